"""A little chaos; ``make chaos`` runs longer ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import conveyor

SECONDS = 20
#: Rounds that there are in any case: where the processor is wanted by many, one may take a minute.
ENOUGH = 3


@pytest.mark.timeout(50 * SECONDS)
def test_a_little_chaos():
    # A program of its own: its faults are to end nobody else's session, nor this process.
    command = [sys.executable, "-u", str(Path(__file__).parent), "--seconds", str(SECONDS)]
    source = Path(conveyor.__file__).parents[1]
    ran = subprocess.run(
        [*command, "--at-least", str(ENOUGH), "--seed", "1", "--hang", "120"],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    rounds = int(ran.stdout.split()[0])
    assert rounds >= ENOUGH, ran.stdout
