"""The two actors: one computes prompts, the other one continues them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import NamedTuple

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import conveyor


class Prompt(NamedTuple):
    """A prompt that has been computed."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]  # of each layer the keys and the values
    token: torch.Tensor  # the first one behind the prompt
    began: float
    done: float


class Answer(NamedTuple):
    tokens: list[int]
    cache_bytes: int
    handover: float  # seconds
    prefill: tuple[float, float]  # when it began and was done
    steps: list[tuple[float, float]]  # the same, of each token


@conveyor.remote
class Prefill:
    def __init__(self, tiny: bool) -> None:
        self.model = load(tiny)

    @conveyor.method(tensor_transport="auto")
    def run(self, ids: torch.Tensor) -> Prompt:
        began = monotonic()
        cache = DynamicCache(config=self.model.config)
        token = next_token(self.model, ids, cache)
        layers = [(deployer.keys, deployer.values) for deployer in cache.layers]
        return Prompt(layers, token, began, monotonic())


@conveyor.remote
class Decoder:
    """Sequences take turns, token by token. Steps have a thread of their own: while one is computed, the
    event loop takes the next cache."""

    def __init__(self, tiny: bool) -> None:
        self.model = load(tiny)
        self.thread = ThreadPoolExecutor(1)

    async def generate(self, prompt: Prompt, count: int) -> Answer:
        handover, prefill = monotonic() - prompt.done, (prompt.began, prompt.done)
        size = sum(tensor.nbytes for deployer in prompt.layers for tensor in deployer)
        cache, token = DynamicCache(prompt.layers, config=self.model.config), prompt.token
        tokens, steps = [int(token)], []
        loop = asyncio.get_running_loop()
        for _ in range(count - 1):
            token, *times = await loop.run_in_executor(self.thread, self.step, token, cache)
            tokens.append(int(token))
            steps.append(tuple(times))
        return Answer(tokens, size, handover, prefill, steps)

    def step(self, token: torch.Tensor, cache: DynamicCache) -> tuple[torch.Tensor, float, float]:
        began = monotonic()
        return next_token(self.model, token, cache), began, monotonic()


def load(tiny: bool) -> LlamaForCausalLM:
    torch.set_num_threads(1)
    if not tiny:
        from model import load_model

        return load_model()
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, **heads, initializer_range=0.3)
    return LlamaForCausalLM(config).requires_grad_(False).eval()


def next_token(model: LlamaForCausalLM, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """The likeliest token behind these, which the cache then has."""
    return model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
