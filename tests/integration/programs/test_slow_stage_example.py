"""The example with a slow stage: what it predicts is what it measures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from integration_helpers import measured

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.alone]

EXAMPLE = Path(__file__).parents[3] / "examples" / "slow_stage.py"
ROW = re.compile(r"^(\w.*?)  +([\d.]+)/s +([\d.]+)/s  (\S+) (\d+)%$", re.MULTILINE)


@measured
def test_predictions_hold():
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=220
    )
    rows = {title: numbers for title, *numbers in ROW.findall(ran.stdout)}
    assert list(rows) == [
        "as it is",
        "depth 4",
        "depth 8",
        "depth 4, overlap",
        "depth 4, overlap, two models",
    ], ran.stdout + ran.stderr
    for title, (predicted, found, busiest, _) in rows.items():
        assert float(found) == pytest.approx(float(predicted), rel=0.1), title
        assert busiest.startswith("Model")
    assert ran.returncode == 0, ran.stdout + ran.stderr

    # Its photos are what the slow stage waits for, as the counters say.
    waits = dict(re.findall(r"(\S+) +waits +(\d+) ms for Source\.fetch", ran.stdout))
    assert int(waits["Model"]) >= 25

    def gain(after, before, column):
        return float(rows[after][column]) / float(rows[before][column])

    for column in (0, 1):  # what the simulation says, and what is so
        assert gain("depth 4", "as it is", column) > 1.15
        assert gain("depth 8", "depth 4", column) < 1.1, "the slow stage has no time for more"
        assert gain("depth 4, overlap", "depth 4", column) > 1.3
        assert gain("depth 4, overlap, two models", "depth 4, overlap", column) > 1.8
    # Why each of them helps: how much of the time the slow stage computes.
    shares = [int(rows[title][3]) for title in ("as it is", "depth 4", "depth 4, overlap")]
    assert shares == sorted(shares)
    assert shares[-1] > 90
