"""The weights, in a transformers model: all of it, or only some layers."""

from __future__ import annotations

import torch
from model_file import ModelFile, open_model_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# transformers' names of a layer's tensors, and GGUF's.
LAYER_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def load_model(
    layers: range | None = None, *, embedding: bool = True, head: bool = True
) -> LlamaForCausalLM:
    """The model with these layers only (default: all), and with or without its two ends."""
    file = open_model_file()
    layers = range(file.settings["llama.block_count"]) if layers is None else layers
    with torch.device("meta"):  # shapes only: neither memory nor random numbers for the weights
        model = LlamaForCausalLM(config(file, len(layers)))
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)  # computed, so not in the file

    weights = {}
    for i, deployer in enumerate(layers):
        for ours, theirs in LAYER_TENSORS.items():
            weight = torch.from_numpy(file.tensor(f"blk.{deployer}.{theirs}.weight"))
            if theirs in ("attn_q", "attn_k"):
                weight = halves_from_pairs(weight, head_dim)
            weights[f"model.layers.{i}.{ours}.weight"] = weight

    # The first matrix is also the last one, and by far the largest.
    ends = torch.from_numpy(file.tensor("token_embd.weight")) if embedding or head else None
    if embedding:
        weights["model.embed_tokens.weight"] = ends
    else:
        model.model.embed_tokens = nn.Identity()
    if head:
        weights["model.norm.weight"] = torch.from_numpy(file.tensor("output_norm.weight"))
        weights["lm_head.weight"] = ends
    else:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()
    model.load_state_dict(weights, assign=True)
    model.requires_grad_(False)
    model.eval()
    return model


def config(file: ModelFile, layers: int) -> LlamaConfig:
    llama = {name.removeprefix("llama."): value for name, value in file.settings.items()}
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=llama["embedding_length"],
        intermediate_size=llama["feed_forward_length"],
        num_attention_heads=llama["attention.head_count"],
        num_key_value_heads=llama["attention.head_count_kv"],
        vocab_size=llama["vocab_size"],
        max_position_embeddings=llama["context_length"],
        rms_norm_eps=llama["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": llama["rope.freq_base"]},
        tie_word_embeddings=True,
        use_cache=True,
    )


def halves_from_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rotary positions turn two dimensions together: neighbours in GGUF, half a head apart here."""
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)
