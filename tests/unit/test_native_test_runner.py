"""What native/tests/run.sh says at its end, of programs that stand for the tests."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "native" / "tests" / "run.sh"

PROGRAMS = {
    "test_fine": """
        said a_test_that_passes; echo ok
        echo "1 passed, 0 failed"
    """,
    "test_fails": """
        said first; echo "[0.2 ms] ok"
        said second; echo "fails.cpp:3: CHECK(x)"; echo FAILED
        said third; echo FAILED
        echo "1 passed, 2 failed"
        exit 1
    """,
    "test_ends": """
        said before; echo ok
        said within; echo "Segmentation fault"
        exit 139
    """,
    "test_hangs": "said for_ever; exit 142",
    "test_flaky": """
        said steady; echo ok
        said shaky
        if [ "$1" = shaky ]; then echo ok; echo "1 passed, 0 failed"; exit 0; fi
        echo "flaky.cpp:3: CHECK(x)"; echo FAILED
        echo "1 passed, 1 failed"
        exit 1
    """,
    "test_races": """
        said races
        if [ "$1" = races ]; then echo ok; echo "1 passed, 0 failed"; exit 0; fi
        echo "races.cpp:3: CHECK(x)"; echo FAILED
        echo "0 passed, 1 failed"
        echo "WARNING: ThreadSanitizer: data race"
        exit 66
    """,
    "test_leaks": """
        said leaves_something; echo ok
        echo "1 passed, 0 failed"
        echo "detected memory leaks"
        exit 23
    """,
}
SAID = 'said() { printf "%-60s " "$1"; }\n'


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)


@pytest.fixture
def run(tmp_path):
    """``run(*programs)``: what it prints with these; ``fuzz`` and ``cmake`` are what those end with."""

    def run(*names, fuzz=0, cmake=0, flavours="thread", flaky=""):
        here, build = tmp_path / "tests", tmp_path / "build"
        script(here / "run.sh", "")
        shutil.copy(RUN, here / "run.sh")
        script(here / "fuzz.sh", f"echo 'what the fuzz targets say'; exit {fuzz}")
        script(tmp_path / "bin" / "cmake", f"echo 'what the compiler says'; exit {cmake}")
        for name in names:
            (here / f"{name}.cpp").touch()
            for flavour in flavours.split():
                program = build / flavour.replace(",", "-") / "bin" / name
                script(program, SAID + PROGRAMS[name])
        environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        environ.pop("FILTER", None)
        done = subprocess.run(
            [here / "run.sh", build],
            env={**environ, "FLAVOURS": flavours, "FLAKY": str(flaky)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )
        return done.returncode, done.stdout.splitlines()

    return run


def test_all_that_pass(run):
    code, lines = run("test_fine", flavours="address,undefined thread")
    assert code == 0
    assert lines[-1] == "native: 2 passed, 0 failed"
    assert not any("FAILED" in line for line in lines)


def test_the_names_of_what_failed_stand_last(run):
    code, lines = run("test_fine", "test_fails", "test_ends", "test_hangs", "test_leaks")
    assert code == 1
    assert lines[-5:] == [
        "FAILED test_ends (thread): exit code 139; within (the program ended in it)",
        "FAILED test_fails (thread): second third",
        "FAILED test_hangs (thread): the test named last hangs; for_ever (the program ended in it)",
        "FAILED test_leaks (thread): exit code 23",
        "native: 3 passed, 5 failed",
    ]
    # And before them what they said, once more.
    again = "\n".join(lines[lines.index("== test_ends (thread) failed: exit code 139") :])
    assert "fails.cpp:3: CHECK(x)" in again
    assert "detected memory leaks" in again
    assert "a_test_that_passes" not in again


def test_what_passes_when_it_is_run_again_is_flaky(run, tmp_path):
    flaky = tmp_path / "flaky.txt"
    code, lines = run("test_flaky", "test_fine", flaky=flaky)
    assert code == 0
    assert lines[-1] == "native: 3 passed, 0 failed"
    assert "flaky: native test_flaky (thread) shaky" in lines
    assert flaky.read_text() == "native test_flaky (thread) shaky\n"


def test_what_fails_again_is_not(run, tmp_path):
    flaky = tmp_path / "flaky.txt"
    code, lines = run("test_fails", "test_flaky", flaky=flaky)
    assert code == 1
    assert lines[-2:] == ["FAILED test_fails (thread): second third", "native: 3 passed, 2 failed"]
    assert flaky.read_text() == "native test_flaky (thread) shaky\n"


def test_what_a_sanitizer_reports_is_not_run_again(run, tmp_path):
    flaky = tmp_path / "flaky.txt"
    code, lines = run("test_races", flaky=flaky)
    assert code == 1
    assert lines[-2:] == ["FAILED test_races (thread): races", "native: 0 passed, 1 failed"]
    assert not flaky.exists()


def test_what_an_earlier_run_left_is_not_said(run):
    assert run("test_fails", flavours="address,undefined thread")[0] == 1
    code, lines = run("test_fails", flavours="thread")
    assert code == 1
    assert not any("address" in line for line in lines)


def test_fuzz_targets_that_fail(run):
    code, lines = run("test_fine", fuzz=1)
    assert code == 1
    assert lines[-3:] == [
        "what the fuzz targets say",
        "FAILED the fuzz targets, or what they once found",
        "native: 1 passed, 1 failed",
    ]


def test_tests_that_cannot_be_compiled(run):
    code, lines = run("test_fine", cmake=1)
    assert code == 1
    assert lines[-2:] == [
        "what the compiler says",
        "native: FAILED, the tests cannot be compiled (thread)",
    ]
