"""A little chaos over nodes; ``make soak-nodes`` runs longer ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import conveyor

ROUNDS = 2
#: s; mostly it is some fifteen.
LIMIT = 280


@pytest.mark.timeout(LIMIT + 20)
def test_a_little_chaos_over_nodes():
    # A program of its own, with a cluster of its own: what it ends is nobody else's.
    chaos = Path(__file__).parents[1] / "chaos"
    command = [sys.executable, "-u", str(chaos), "--nodes", "--rounds", str(ROUNDS), "--seed", "2"]
    ran = subprocess.run(
        [*command, "--hang", "30"],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(conveyor.__file__).parents[1]),
            "RAY_ADDRESS": "",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    assert ran.stdout.startswith(f"{ROUNDS} rounds over nodes"), ran.stdout
