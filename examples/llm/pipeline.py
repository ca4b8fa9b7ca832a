"""A language model as a pipeline of actors: each holds some of the layers and its own KV cache.

    driver --token ids--> stage0 --hidden states--> stage1 --next token--> driver

The graph is compiled once. Then each token is one execution: no scheduler and no set-up, only
the tensors going from process to process through shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import conveyor
from conveyor.dag import InputNode

if TYPE_CHECKING:  # the driver starts the stages first, and imports torch while they load
    import torch


@conveyor.remote
class Stage:
    """Stage ``index`` of ``count``. The first embeds tokens, the last picks the next one."""

    def __init__(self, index: int, count: int, total_layers: int) -> None:
        from model import load_model

        self.is_first, self.is_last = index == 0, index == count - 1
        self.layers = range(index * total_layers // count, (index + 1) * total_layers // count)
        self.model = load_model(self.layers, embedding=self.is_first, head=self.is_last)
        self.reset()

    def reset(self) -> None:
        """Forget the last prompt."""
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        self.seconds: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From token ids (first stage) or hidden states, to hidden states or the next token id."""
        started = perf_counter()
        if self.is_first:
            x = self.model.model.embed_tokens(x)
        x = self.model.model(inputs_embeds=x, past_key_values=self.cache).last_hidden_state
        if self.is_last:
            x = self.model.lm_head(x[:, -1:]).argmax(-1)
        self.seconds.append(perf_counter() - started)
        return x

    def compute_seconds(self) -> list[float]:
        """How long each ``forward`` since the last ``reset`` took."""
        return self.seconds

    def describe(self) -> StageInfo:
        import torch

        return StageInfo(self.layers, torch.get_num_threads())


class StageInfo(NamedTuple):
    layers: range
    threads: int


class Token(NamedTuple):
    id: int
    seconds: float


def start_stages(count: int, total_layers: int) -> list[Any]:
    """The actors; they load their layers in parallel, and this does not wait for them."""
    return [
        Stage.options(num_cpus=1, name=f"stage{i}").remote(i, count, total_layers)
        for i in range(count)
    ]


def compile_pipeline(stages: list[Any]) -> Any:
    """driver -> stage0 -> stage1 -> ... -> driver"""
    with InputNode() as x:
        for stage in stages:
            x = stage.forward.bind(x)
    return x.compile()


def generate(graph: Any, prompt: torch.Tensor, limit: int, end: int) -> Iterator[Token]:
    """The prompt is one execution, and then every token is."""
    x = prompt
    for _ in range(limit):
        started = perf_counter()
        x = conveyor.get(graph.execute(x))
        token = int(x)
        yield Token(token, perf_counter() - started)
        if token == end:
            return
