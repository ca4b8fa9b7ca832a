"""Reinforcement learning with weights and rollouts as direct objects: the example checks itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("conveyor._core")

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo" / "train.py"
CHECKS = 6


def run(*arguments: str) -> str:
    command = [sys.executable, "-W", "error::UserWarning", str(EXAMPLE), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=230)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_weights_and_rollouts_are_what_they_are_said_to_be() -> None:
    printed = run("--steps", "6", "--prompts", "4", "--rise", "-1")
    assert "weights 0.41 MB, by read" in printed
    assert "(12 updates, by read)" in printed
    assert "oldest rollout 1 version behind" in printed
    assert printed.count(": yes\n") == CHECKS


@pytest.mark.skipif(
    os.environ.get("CONVEYOR_TEST_DEMO") != "1", reason="set CONVEYOR_TEST_DEMO=1 to run the demo"
)
def test_the_reward_rises() -> None:
    found = re.search(r"reward ([\d.]+) -> ([\d.]+)", run())
    assert found is not None
    assert float(found[1]) + 0.15 <= float(found[2])
