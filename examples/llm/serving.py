"""The stages of a server: one step computes the next tokens of many sequences at once.

    engine --step--> stage0 --hidden states--> stage1 --next tokens--> engine
                \\-------------------------------^

A step says which sequences take part, with which tokens, and which have ended. The matrices of a layer go
over the tokens of all of them together; each sequence attends to keys and values of its own, which every
stage keeps for its layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine import Step

import conveyor
from conveyor.dag import InputNode

if TYPE_CHECKING:  # the engine's process needs none
    import torch


@conveyor.remote
class ServingStage:
    """Stage ``index`` of ``count``. The first embeds tokens, the last picks the next ones."""

    def __init__(self, index: int, count: int, total_layers: int, threads: int = 1) -> None:
        import torch
        from model import load_model

        torch.set_num_threads(threads)
        self.is_first, self.is_last = index == 0, index == count - 1
        layers = range(index * total_layers // count, (index + 1) * total_layers // count)
        self.model = load_model(layers, embedding=self.is_first, head=self.is_last)
        #: By sequence, for each layer the keys and the values of its tokens so far.
        self.caches: dict[int, list[tuple[torch.Tensor, torch.Tensor] | None]] = {}

    def forward(self, step: Step, x: torch.Tensor | None = None) -> torch.Tensor | list[int]:
        """From the tokens of a step (first stage) or their hidden states, to hidden states or the next token
        of each sequence."""
        import torch

        model = self.model.model
        for sequence in step.ended:
            self.caches.pop(sequence, None)
        for part in step.parts:
            self.caches.setdefault(part.sequence, [None] * len(model.layers))
        if self.is_first:
            x = model.embed_tokens(torch.tensor([t for part in step.parts for t in part.tokens]))
        positions = [p for part in step.parts for p in range(part.start, part.end)]
        rotary = model.rotary_emb(x[None], torch.tensor([positions]))
        for index, deployer in enumerate(model.layers):
            x = x + self._attend(index, deployer, deployer.input_layernorm(x), rotary, step)
            x = x + deployer.mlp(deployer.post_attention_layernorm(x))
        if not self.is_last:
            return x
        lengths = torch.tensor([len(part.tokens) for part in step.parts])
        last = x[lengths.cumsum(0) - 1]
        return self.model.lm_head(model.norm(last)).argmax(-1).tolist()

    def _attend(self, index: int, deployer: Any, x: torch.Tensor, rotary: Any, step: Step) -> Any:
        """The attention of one layer: each sequence to itself."""
        import torch
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        attention = deployer.self_attn
        queries, keys, values = (
            project(x).unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)[None]
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotary)
        given, begin = [], 0
        for part in step.parts:
            here = slice(begin, begin + len(part.tokens))
            begin = here.stop
            k, v = keys[:, :, here], values[:, :, here]
            cached = self.caches[part.sequence][index]
            if cached is not None:
                k, v = torch.cat([cached[0], k], 2), torch.cat([cached[1], v], 2)
            self.caches[part.sequence][index] = k, v
            own = torch.nn.functional.scaled_dot_product_attention(
                queries[:, :, here], k, v, is_causal=len(part.tokens) > 1, enable_gqa=True
            )
            given.append(own.transpose(1, 2).flatten(2)[0])
        return attention.o_proj(torch.cat(given))

    def held(self) -> int:
        """How many sequences this stage keeps anything of."""
        return len(self.caches)


def start_serving(count: int, total_layers: int, threads: int = 1) -> list[Any]:
    """The actors; they load their layers in parallel, and this does not wait for them."""
    return [
        ServingStage.options(name=f"serving{i}").remote(i, count, total_layers, threads)
        for i in range(count)
    ]


def compile_serving(stages: list[Any]) -> Any:
    """Every stage is told of each step, and hands hidden states to the next one."""
    with InputNode() as step:
        x = stages[0].forward.bind(step)
        for stage in stages[1:]:
            x = stage.forward.bind(step, x)
    return x.compile(depth=len(stages) + 1)
