"""The reference for int8 index keys: transformers' model whose indexers quantise queries and keys as Sluice does.

The quantiser is written again here, with a full Hadamard matrix, from the definition.
"""

from __future__ import annotations

import importlib
from functools import cached_property
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from tests.oracle import Oracle

_ROTATIONS = {
    "deepseek_v32": ("transformers.models.deepseek_v32.modeling_deepseek_v32", "apply_rotary_pos_emb"),
    "glm_moe_dsa": ("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa", "apply_rotary_pos_emb_interleave"),
}


class Int8Oracle(Oracle):
    """`Oracle` of a checkpoint served with `kv.indexer_dtype: int8`."""

    def __init__(self, model_dir: str | Path) -> None:
        super().__init__(model_dir)
        self._fingerprint += "/int8-indexer"

    @cached_property
    def _model(self) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._dir, dtype=torch.float32)
        module, name = _ROTATIONS[model.config.model_type]
        rotate = getattr(importlib.import_module(module), name)
        for layer in model.model.layers:
            indexer = getattr(layer.self_attn, "indexer", None)
            if indexer is not None:
                indexer.rotate = rotate
                indexer.forward = MethodType(_select, indexer)
        return model


def hadamard(dims: int) -> Tensor:
    """[dims, dims] Hadamard matrix of Sylvester's construction, without normalisation."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < dims:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> int8 levels as float32, and [...] scales that float16 can hold, as float32."""
    dims = x.shape[-1]
    rotated = x.float() @ hadamard(dims) * dims**-0.5
    scale = (rotated.abs().amax(-1) / 127).half().float()
    return (rotated / scale[..., None]).round().clamp(-127, 127), scale


def index_scores(q: Tensor, k: Tensor, raw_weights: Tensor) -> Tensor:
    """[S, T] scores of q [S, H, D] against k [T, D]; raw_weights [S, H] without constant factors."""
    q_levels, q_scale = quantise(q)
    k_levels, k_scale = quantise(k)
    products = (torch.einsum("shd,td->sht", q_levels, k_levels).relu() * 2.0**-10).half().float()
    weights = (raw_weights * q_scale).half().float()
    return torch.einsum("sh,sht->st", weights, products) * k_scale


def _select(
    self: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor,
    cache: Any = None,
) -> Tensor:
    """Takes the place of an indexer's `forward`; batch 1."""
    rope = self.qk_rope_head_dim
    q = self.wq_b(q_resid).view(1, -1, self.n_heads, self.head_dim)
    k = self.k_norm(self.wk(hidden_states)).unsqueeze(2)
    q_rot, k_rot = self.rotate(q[..., :rope], k[..., :rope], *position_embeddings, unsqueeze_dim=2)
    q, k = torch.cat((q_rot, q[..., rope:]), -1), torch.cat((k_rot, k[..., rope:]), -1).squeeze(2)
    if cache is not None:
        k = cache.update_indexer(k, self.layer_idx)
    scores = index_scores(q[0], k[0], self.weights_proj(hidden_states)[0].float())[None]
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    else:
        scores = scores + attention_mask
    return scores.topk(min(self.index_topk, scores.shape[-1]), dim=-1).indices.int()
