"""Teaching the lightning indexer to rank tokens as dense attention does (DeepSeek-V3.2, dense warm-up stage)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GlmMoeDsaForCausalLM

from engine.model.layers import rotate


class IndexerInputs:
    """Records what each layer's indexer was given during a forward pass; a context manager."""

    def __init__(self, model: GlmMoeDsaForCausalLM) -> None:
        self._indexers = [layer.self_attn.indexer for layer in model.model.layers]
        self._rope_dim = model.config.qk_rope_head_dim
        self._seen: list[tuple[Any, ...]] = []

    def __enter__(self) -> IndexerInputs:
        self._handles = [indexer.register_forward_pre_hook(self._record) for indexer in self._indexers]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._seen.append(arguments[:3])

    def loss(self, attentions: Sequence[Tensor]) -> Tensor:
        """Mean over layers and tokens of KL(attention averaged over heads || softmax of index scores).

        `attentions` holds each layer's dense weights [B, heads, S, S]; gradients reach the indexers only.
        """
        losses = []
        for indexer, (hidden, q_latent, (cos, sin)), weights in zip(
            self._indexers, self._seen, attentions, strict=True
        ):
            scores = _scores(indexer, hidden.detach(), q_latent.detach(), cos, sin, self._rope_dim)
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            target = weights.detach().mean(1)
            log_model = scores.masked_fill(future, float("-inf")).log_softmax(-1).masked_fill(future, 0.0)
            losses.append((torch.special.xlogy(target, target) - target * log_model).sum(-1).mean())
        return torch.stack(losses).mean()


def _scores(indexer: Any, hidden: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor, rope_dim: int) -> Tensor:
    """Index scores [B, S, S] with gradients; transformers computes its own without."""
    half = rope_dim // 2
    cos, sin = cos[..., :half], sin[..., :half]
    q = indexer.wq_b(q_latent).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden))
    q = torch.cat((rotate(q[..., :rope_dim], cos[..., None, :], sin[..., None, :], True), q[..., rope_dim:]), -1)
    k = torch.cat((rotate(k[..., :rope_dim], cos, sin, True), k[..., rope_dim:]), -1)
    products = torch.einsum("bshd,btd->bsht", q, k).relu() * indexer.softmax_scale
    return torch.einsum("bsht,bsh->bst", products, indexer.weights_proj(hidden) * indexer.n_heads**-0.5)
