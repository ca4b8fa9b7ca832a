"""A little chaos; ``make chaos`` runs longer ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import conveyor

SECONDS = 20
#: Rounds in this time if the machine is as slow as can be thought of.
ENOUGH = 3


@pytest.mark.timeout(9 * SECONDS)
def test_a_little_chaos():
    # A program of its own: its faults are to end nobody else's session, nor this process.
    command = [sys.executable, "-u", str(Path(__file__).parent), "--seconds", str(SECONDS)]
    source = Path(conveyor.__file__).parents[1]
    ran = subprocess.run(
        [*command, "--seed", "1", "--hang", "60"],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    rounds = int(ran.stdout.split()[0])
    assert rounds >= ENOUGH, ran.stdout
