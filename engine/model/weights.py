"""One tensor-parallel rank's weights, as plain frozen dataclasses.

Shapes use: H hidden_size, N local attention heads, P qk_nope_head_dim, R qk_rope_head_dim, V v_head_dim,
L kv_lora_rank, Q q_lora_rank, Hi index heads, Di index head dim, I local intermediate size, E routed experts.
Linear weights are [out, in]. All are in the model's dtype but for the router's, which are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class IndexerWeights:
    """Lightning indexer, the same on every rank."""

    wq_b: Tensor  # [Hi*Di, Q]
    wk: Tensor  # [Di, H]
    k_norm_weight: Tensor  # [Di]
    k_norm_bias: Tensor  # [Di]
    weights_proj: Tensor  # [Hi, H]


@dataclass(frozen=True)
class AttentionWeights:
    """Multi-head latent attention with kv_b_proj already split for absorption."""

    q_a_proj: Tensor  # [Q, H]
    q_a_norm: Tensor  # [Q]
    q_b_proj: Tensor  # [N*(P+R), Q]
    kv_a_proj: Tensor  # [L+R, H]
    kv_a_norm: Tensor  # [L]
    w_uk: Tensor  # [N, P, L]
    w_uv: Tensor  # [N, L, V]
    o_proj: Tensor  # [H, N*V]
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class MlpWeights:
    """A SwiGLU block; gate and up are stacked so that one product computes both."""

    gate_up: Tensor  # [2*I, H]
    down: Tensor  # [H, I]


@dataclass(frozen=True)
class MoeWeights:
    """Router (whole) and this rank's share of the experts: `first_expert` .. `first_expert + len(experts) - 1`."""

    gate: Tensor  # [E, H] float32
    correction_bias: Tensor  # [E] float32
    first_expert: int
    experts: tuple[MlpWeights, ...]
    shared: MlpWeights


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor  # [H]
    attention: AttentionWeights
    post_attention_norm: Tensor  # [H]
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True)
class DraftWeights:
    """The multi-token-prediction layer; embedding and head are the model's own where the checkpoint has none."""

    embed: Tensor  # [vocab, H]
    embed_norm: Tensor  # [H] enorm
    hidden_norm: Tensor  # [H] hnorm
    project: Tensor  # [H, 2*H] eh_proj, over (embedding, hidden)
    layer: LayerWeights
    norm: Tensor  # [H] shared_head.norm
    lm_head: Tensor  # [vocab, H]


@dataclass(frozen=True)
class ModelWeights:
    """The whole decoder; embedding and output head are the same on every rank (and one tensor when tied)."""

    embed: Tensor  # [vocab, H]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [H]
    lm_head: Tensor  # [vocab, H]
    draft: DraftWeights | None = None
