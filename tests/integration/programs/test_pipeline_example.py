"""The example of pipeline-parallel training: all schedules, whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from integration_helpers import measured

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.alone]

EXAMPLE = Path(__file__).parents[3] / "examples" / "pipeline"


@measured
def test_a_step_by_each_schedule():
    """The example compares gradients and each stage's order, and exits with 1 if they are wrong."""
    ran = subprocess.run(
        [sys.executable, "train.py", "--stages", "2", "--microbatches", "4"],
        cwd=EXAMPLE,
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [line.split() for line in ran.stdout.splitlines()[1:]]
    formulas = {"gpipe": 1 / 5, "1f1b": 1 / 5, "zero-bubble": 1 / 13}
    assert [row[0] for row in rows] == list(formulas)
    for schedule, *bubbles, order, _ in rows:
        by_formula, simulated, measured = (float(text.rstrip("%")) / 100 for text in bubbles)
        assert by_formula == pytest.approx(formulas[schedule], abs=0.001)
        # What the stages really took is in it, on a machine that others use as well.
        assert simulated == pytest.approx(by_formula, abs=0.05)
        assert measured == pytest.approx(simulated, abs=0.05)
        assert order == "good"


def test_all_files_are_short():
    for path in EXAMPLE.glob("*.py"):
        assert len(path.read_text().splitlines()) < 100, path.name
