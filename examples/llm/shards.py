"""A language model over ranks of tensor parallelism, in stages of a pipeline: two ways to split it at once.

    driver --token ids--> stage0.0, stage0.1 --hidden states--> stage1.0, stage1.1 --next token--> driver

Each rank of a stage holds some heads and some hidden units of every layer of its stage. What its part of an
attention or of an MLP gives is summed over the ranks by an allreduce, which is a part of the graph as the
methods are: two for each layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline import StageInfo

import conveyor
from conveyor.dag import InputNode
from conveyor.experimental import collective

if TYPE_CHECKING:  # the driver starts the shards first, and imports torch while they load
    import torch


@conveyor.remote
class Shard:
    """Rank ``rank`` of ``ranks`` in stage ``stage`` of ``stages``. It keeps the state of the token that is on
    its way, since the executions of a graph come one after the other."""

    def __init__(self, stage: int, stages: int, rank: int, ranks: int, total_layers: int) -> None:
        import torch
        from model import load_model

        torch.set_num_threads(1)
        self.layers = range(stage * total_layers // stages, (stage + 1) * total_layers // stages)
        last = stage == stages - 1
        self.model = load_model(self.layers, embedding=stage == 0, head=last and rank == 0)
        self.heads = self.model.config.num_key_value_heads
        for deployer in self.model.model.layers:
            split(deployer, rank, ranks, self.model.config)
        self.reset()

    def reset(self) -> None:
        """Forget the last prompt."""
        self.keys: list[Any] = [None] * len(self.layers)
        self.values: list[Any] = [None] * len(self.layers)
        self.position = 0

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """From token ids to hidden states."""
        return self.model.model.embed_tokens(ids)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Begin with the hidden states of the stage before, or of the embedding."""
        import torch

        self.x = x
        positions = torch.arange(self.position, self.position + x.shape[1])[None]
        self.rotary = self.model.model.rotary_emb(x, positions)
        self.position += x.shape[1]
        return self.attend(0)

    def attend(self, index: int, summed: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part of the attention of a layer. ``summed``: what the MLP before it gave."""
        import torch
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        if summed is not None:
            self.x = self.x + summed
        deployer = self.model.model.layers[index]
        attention, normed = deployer.self_attn, deployer.input_layernorm(self.x)
        queries, keys, values = (
            project(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *self.rotary)
        if self.keys[index] is not None:
            keys = torch.cat([self.keys[index], keys], 2)
            values = torch.cat([self.values[index], values], 2)
        self.keys[index], self.values[index] = keys, values
        given = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=queries.shape[2] > 1, enable_gqa=True
        )
        return attention.o_proj(given.transpose(1, 2).flatten(2))

    def feed(self, index: int, summed: torch.Tensor) -> torch.Tensor:
        """This rank's part of the MLP of a layer. ``summed``: what the attention gave."""
        deployer = self.model.model.layers[index]
        self.x = self.x + summed
        return deployer.mlp(deployer.post_attention_layernorm(self.x))

    def leave(self, summed: torch.Tensor) -> torch.Tensor:
        """The hidden states after the last layer of this stage."""
        return self.x + summed

    def pick(self, summed: torch.Tensor) -> torch.Tensor:
        """The next token."""
        return self.model.lm_head(self.model.model.norm((self.x + summed)[:, -1:])).argmax(-1)

    def describe(self) -> StageInfo:
        return StageInfo(self.layers, 1)


def split(deployer: Any, rank: int, ranks: int, config: Any) -> None:
    """Leave of a layer what rank ``rank`` holds. The heads need not be a multiple of the ranks: here they are
    three, and two ranks have two and one."""
    heads = config.num_key_value_heads
    queries = config.num_attention_heads // heads * deployer.self_attn.head_dim
    own = slice(rank * heads // ranks, (rank + 1) * heads // ranks)
    units = config.intermediate_size
    hidden = slice(rank * units // ranks, (rank + 1) * units // ranks)
    attention, mlp = deployer.self_attn, deployer.mlp
    keep(attention.q_proj, 0, own, queries)
    keep(attention.k_proj, 0, own, attention.head_dim)
    keep(attention.v_proj, 0, own, attention.head_dim)
    keep(attention.o_proj, 1, own, queries)
    keep(mlp.gate_proj, 0, hidden, 1)
    keep(mlp.up_proj, 0, hidden, 1)
    keep(mlp.down_proj, 1, hidden, 1)


def keep(linear: Any, dimension: int, part: slice, width: int) -> None:
    """Keep some rows (0) or columns (1) of a matrix, of blocks that are ``width`` wide."""
    import torch

    begin, end = part.start * width, part.stop * width
    weight = linear.weight.narrow(dimension, begin, end - begin).clone()
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)


def start_shards(stages: int, ranks: int, total_layers: int) -> list[list[Any]]:
    """The actors, by stage and rank; they load their layers in parallel, and this does not wait for them."""
    return [
        [
            Shard.options(name=f"stage{stage}.{rank}").remote(
                stage, stages, rank, ranks, total_layers
            )
            for rank in range(ranks)
        ]
        for stage in range(stages)
    ]


def compile_shards(shards: list[list[Any]], total_layers: int) -> Any:
    """One token: every layer of every stage, with an allreduce behind each attention and each MLP."""
    stages = len(shards)
    with InputNode() as ids:
        x = [shards[0][0].embed.bind(ids)] * len(shards[0])
        for stage, ranks in enumerate(shards):
            partial = [rank.enter.bind(y) for rank, y in zip(ranks, x, strict=True)]
            layers = (stage + 1) * total_layers // stages - stage * total_layers // stages
            for index in range(layers):
                summed = collective.allreduce.bind(partial)
                partial = [rank.feed.bind(index, y) for rank, y in zip(ranks, summed, strict=True)]
                x = collective.allreduce.bind(partial)
                if index + 1 < layers:
                    partial = [
                        rank.attend.bind(index + 1, y) for rank, y in zip(ranks, x, strict=True)
                    ]
            if stage + 1 < stages:
                x = [rank.leave.bind(y) for rank, y in zip(ranks, x, strict=True)]
        token = shards[-1][0].pick.bind(x[0])
    return token.compile()
