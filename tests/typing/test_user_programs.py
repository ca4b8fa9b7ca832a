"""Typed programs of users: type checkers accept what is right in them and see what is wrong, and they run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PROGRAMS = sorted((HERE / "programs").glob("*.py"))
NAMES = [program.stem for program in PROGRAMS]


def wrong_lines(program):
    lines = program.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def mypy_errors(program):
    done = run(sys.executable, "-m", "mypy", "--no-pretty", str(program))
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = re.findall(r"^(.+?):(\d+): error", done.stdout, re.MULTILINE)
    assert all(Path(path).name == program.name for path, _ in lines), done.stdout
    return {int(line) for _, line in lines}, done.stdout


def pyright_errors(program):
    command = ["--outputjson", "--pythonpath", sys.executable, str(program)]
    done = run(sys.executable, "-m", "basedpyright", *command)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [d for d in json.loads(done.stdout)["generalDiagnostics"] if d["severity"] == "error"]
    return {d["range"]["start"]["line"] + 1 for d in found}, done.stdout


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.stem != "decorated"], ids=lambda p: p.stem
)
def test_mypy_sees_what_is_wrong(program):
    pytest.importorskip("mypy")
    errors, told = mypy_errors(program)
    assert errors == wrong_lines(program), told


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_pyright_sees_what_is_wrong(program):
    pytest.importorskip("basedpyright")
    errors, told = pyright_errors(program)
    assert errors == wrong_lines(program), told


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_the_program_runs(program):
    done = run(sys.executable, str(program))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
