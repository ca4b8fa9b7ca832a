"""What the Makefile says of a system on which the library cannot be built."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def first_step(tmp_path):
    """Run the first step of every target with these settings."""

    def run(**settings):
        return subprocess.run(
            ["make", f"VENV={tmp_path}", f"{tmp_path}/.stamps/venv"]
            + [f"{name}={value}" for name, value in settings.items()],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=100,
        )

    return run


@pytest.fixture
def python(tmp_path):
    """A program that takes itself for a Python with its headers in an empty folder."""

    def make(code):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\necho {tmp_path}\nexit {code}\n")
        path.chmod(0o755)
        return path

    return make


def missing(step):
    assert step.returncode != 0
    first, *_ = step.stderr.splitlines()
    assert first.startswith("conveyor cannot be built: ")
    return first


def test_no_python(first_step):
    assert "is not Python 3.10 or newer" in missing(first_step(PYTHON="/nowhere/python"))


def test_a_python_that_makes_no_environments(first_step, python):
    assert "has no ensurepip" in missing(first_step(PYTHON=python(1)))


def test_a_python_without_headers(first_step, python):
    assert "no Python.h" in missing(first_step(PYTHON=python(0)))


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false"])
def test_no_compiler(first_step, compiler):
    assert "no C++20 compiler" in missing(first_step(CXX=compiler))


def test_all_is_there(first_step, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/true")  # an environment that is there already
    step = first_step()
    assert step.returncode == 0, step.stderr
    assert (tmp_path / ".stamps" / "venv").exists()
