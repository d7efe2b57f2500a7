"""The model in training: transformers' own, started so that it learns to copy quickly."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

INDEX_TOPK = 64
_ROPE_THETA = 10000.0


def new_model(vocab_size: int, seed: int) -> GlmMoeDsaForCausalLM:
    """A glm_moe_dsa model of 1.1 M parameters: three layers, four experts, 16 rope dims."""
    torch.manual_seed(seed)
    config = GlmMoeDsaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=48,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=INDEX_TOPK,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        max_position_embeddings=65536,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    config._experts_implementation = "eager"
    model = GlmMoeDsaForCausalLM(config)
    _initialise(model)
    _look_back(model)
    return model


def set_topk(model: GlmMoeDsaForCausalLM, topk: int) -> None:
    """How many tokens each token attends to; more than the text is long makes attention dense."""
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = topk


def run(model: GlmMoeDsaForCausalLM, tokens: Tensor, positions: Tensor, attentions: bool = False) -> Any:
    """Forward pass over [B, S] tokens at `positions`, causal in order of the row whatever the positions."""
    size, length = tokens.shape
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(size, 1, length, length)
    if attentions:  # eager attention adds its mask
        causal = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    return model(
        tokens,
        position_ids=positions,
        attention_mask={"indexed_attention": causal},
        use_cache=False,
        output_attentions=attentions,
    )


@torch.no_grad()
def _initialise(model: GlmMoeDsaForCausalLM) -> None:
    """Linear weights with unit gain, residual outputs smaller, logits near zero at first."""
    depth = 2 * model.config.num_hidden_layers
    for name, weight in model.named_parameters():
        if weight.dim() < 2 or name.endswith("gate.weight"):
            continue
        gain = weight.shape[-1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
            gain *= depth**-0.5
        elif "embed_tokens" in name:
            gain = 0.5
        elif "lm_head" in name:
            gain = 0.02
        nn.init.normal_(weight, std=gain)


@torch.no_grad()
def _look_back(model: GlmMoeDsaForCausalLM, sharpness: float = 12.0) -> None:
    """Make head h of the first layer attend to the token h + 1 places back.

    Copying needs heads that know the preceding tokens, and gradient descent takes long to find them. Channel 0 of
    the embedding becomes a constant 1; from it the rope part of keys is the same everywhere, and that of head h's
    query is turned back by h + 1 positions, so the product is largest at that distance.
    """
    config, attention = model.config, model.model.layers[0].self_attn
    rope, nope, latent = config.qk_rope_head_dim, config.qk_nope_head_dim, config.kv_lora_rank
    embedding = model.model.embed_tokens.weight
    embedding[:, 0] = 1.0
    constant = 1.0 / math.sqrt(float(embedding.pow(2).mean()))  # channel 0 after the layer's input norm
    key_size, query_size = 6.0, 3.0
    keys = attention.kv_a_proj_with_mqa.weight
    keys[latent:] = 0
    keys[latent::2, 0] = key_size / constant
    attention.q_a_proj.weight[0] = 0
    attention.q_a_proj.weight[0, 0] = query_size / constant
    normed = query_size / math.sqrt((config.q_lora_rank - 1 + query_size**2) / config.q_lora_rank)
    size = sharpness / (key_size * attention.scaling * normed)
    frequencies = _ROPE_THETA ** -(torch.arange(0, rope, 2) / rope)
    queries = attention.q_b_proj.weight.view(config.num_attention_heads, nope + rope, -1)
    queries[:, :nope] *= 0.1
    queries[:, nope:] = 0
    for head in range(config.num_attention_heads):
        angles = frequencies * (head + 1)
        queries[head, nope::2, 0] = size * angles.cos()
        queries[head, nope + 1 :: 2, 0] = -size * angles.sin()
