"""Tests that fail are run once more, and those that pass then are named."""

import subprocess
import sys
from pathlib import Path

import pytest

RERUN = Path(__file__).parents[1] / "rerun.py"

FLAKY = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("n", range({n}))
def test_flaky(n):
    before = Path(__file__).with_name(f"seen-{{n}}")
    if not before.exists():
        before.touch()
        assert False, "the first time"

def test_right():
    pass
"""

BROKEN = """
def test_wrong():
    assert False
"""


def rerun(tmp_path, *args):
    done = subprocess.run(
        [sys.executable, RERUN, "--flaky", tmp_path / "flaky.txt", *args],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadfile")])
def test_a_flaky_test_is_named_and_the_suite_passes(tmp_path, workers):
    (tmp_path / "test_it.py").write_text(FLAKY.format(n=2))
    assert rerun(tmp_path, *workers)[0] == 0
    status, told = rerun(tmp_path, "--summary")
    assert status == 0
    assert told.splitlines() == [f"flaky: test_it.py::test_flaky[{n}]" for n in range(2)]


def test_more_than_three_fail_the_suite(tmp_path):
    (tmp_path / "test_it.py").write_text(FLAKY.format(n=4))
    assert rerun(tmp_path)[0] == 0
    assert rerun(tmp_path, "--summary")[0] == 1


def test_a_test_that_fails_twice_fails_the_suite(tmp_path):
    (tmp_path / "test_it.py").write_text(FLAKY.format(n=1))
    (tmp_path / "test_broken.py").write_text(BROKEN)
    status, told = rerun(tmp_path)
    assert status == 1
    assert "test_wrong" in told
    assert (tmp_path / "flaky.txt").read_text() == "test_it.py::test_flaky[0]\n"


@pytest.mark.parametrize("source", ["import nothing_of_this_name", "def test_it(:"])
def test_a_file_that_cannot_be_read_fails_the_suite(tmp_path, source):
    (tmp_path / "test_it.py").write_text(source)
    assert rerun(tmp_path)[0] not in (0, 5)


def test_no_tests_and_passing_tests_pass(tmp_path):
    assert rerun(tmp_path)[0] == 0
    (tmp_path / "test_it.py").write_text("def test_right(): pass")
    assert rerun(tmp_path)[0] == 0
    assert rerun(tmp_path, "--summary") == (0, "")


def test_workers_that_collect_different_tests_fail_the_suite(tmp_path):
    source = "import os, pytest\n@pytest.mark.parametrize('n', [os.getpid()])\ndef test_it(n): pass"
    (tmp_path / "test_it.py").write_text(source)
    (tmp_path / "test_right.py").write_text("def test_right(): pass")
    status, told = rerun(tmp_path, "-n", "2")
    assert status != 0
    assert "Different tests were collected" in told
