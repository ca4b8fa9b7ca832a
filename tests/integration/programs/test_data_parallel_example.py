"""The example of data-parallel training checks itself at each step."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[3] / "examples" / "data_parallel.py"


def test_the_weights_are_those_of_one_process():
    command = [sys.executable, "-W", "error::UserWarning", str(EXAMPLE)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "steps on 2 replicas" in ran.stdout
