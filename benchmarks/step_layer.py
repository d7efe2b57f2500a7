"""One decoder layer of real size with random weights."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.weights import AttentionWeights, IndexerWeights, LayerWeights, MlpWeights, ModelWeights


def random_layer(model: ModelConfig) -> ModelWeights:
    """A model of one dense layer, without a vocabulary to speak of; bfloat16.

    The dense MLP of DeepSeek-V3.2 has the size of what one token uses of its experts: 18432 = (8 + 1) * 2048.
    """
    m, rng = model, torch.Generator().manual_seed(19)

    def matrix(*shape: int) -> Tensor:
        row = torch.randn(1, *shape[1:], generator=rng).mul_(shape[-1] ** -0.5).bfloat16()
        return row.expand(*shape).clone()

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    heads, hidden = m.num_attention_heads, m.hidden_size
    indexer = IndexerWeights(
        wq_b=matrix(m.index_n_heads * m.index_head_dim, m.q_lora_rank),
        wk=matrix(m.index_head_dim, hidden),
        k_norm_weight=ones(m.index_head_dim),
        k_norm_bias=ones(m.index_head_dim),
        weights_proj=matrix(m.index_n_heads, hidden),
    )
    attention = AttentionWeights(
        q_a_proj=matrix(m.q_lora_rank, hidden),
        q_a_norm=ones(m.q_lora_rank),
        q_b_proj=matrix(heads * m.qk_head_dim, m.q_lora_rank),
        kv_a_proj=matrix(m.kv_lora_rank + m.qk_rope_head_dim, hidden),
        kv_a_norm=ones(m.kv_lora_rank),
        w_uk=matrix(heads, m.qk_nope_head_dim, m.kv_lora_rank),
        w_uv=matrix(heads, m.kv_lora_rank, m.v_head_dim),
        o_proj=matrix(hidden, heads * m.v_head_dim),
        indexer=indexer,
    )
    mlp = MlpWeights(matrix(2 * m.intermediate_size, hidden), matrix(hidden, m.intermediate_size))
    layer = LayerWeights(ones(hidden), attention, ones(hidden), mlp)
    vocabulary = matrix(8, hidden)
    return ModelWeights(vocabulary, (layer,), ones(hidden), vocabulary)
