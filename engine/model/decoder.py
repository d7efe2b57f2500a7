"""The DSA decoder: latent attention behind an injected backend, lightning indexer, dense and MoE blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.attention import AttentionBackend, IndexerQuery
from engine.model.config import LORA_NORM_EPS, ModelConfig
from engine.model.layers import RotaryEmbedding, rms_norm, rotate, swiglu
from engine.model.moe import mixture
from engine.model.parallel import SingleRank, TensorParallel
from engine.model.shard import check_divisible
from engine.model.weights import AttentionWeights, IndexerWeights, LayerWeights, ModelWeights, MoeWeights

_INDEX_NORM_EPS = 1e-6


class KvRows(NamedTuple):
    """What one layer caches of T tokens; all in the model's dtype."""

    ckv: Tensor  # [T, kv_lora_rank], normed
    k_rope: Tensor  # [T, R], rotated
    index_key: Tensor | None  # [T, Di], normed and rotated; None without an indexer


class DsaDecoder:
    """Runs one step over packed tokens of any mix of requests; holds weights but no request state.

    Invariant: what a token computes depends on its id, its position and the rows the backend attends to, never on
    the other tokens packed into the step (up to float rounding, as the size of a product may change its blocking).
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, group: TensorParallel | None, dtype: torch.dtype
    ) -> None:
        """`weights` are those of this rank of `group` (None: a single rank), in `dtype`.

        Raises:
            TensorParallelError: the group's size does not divide the model.
        """
        self.config = config
        self.dtype = dtype
        self.weights = weights
        self._group = group or SingleRank()
        check_divisible(config, self._group.shard)
        self._local_heads = config.num_attention_heads // self._group.shard.size
        self._rope = RotaryEmbedding(config.rope, config.qk_rope_head_dim, dtype, weights.embed.device)

    @torch.no_grad()
    def forward(
        self, token_ids: Tensor, positions: Tensor, backend: AttentionBackend, select: Tensor | None = None
    ) -> Tensor:
        """Compute one step.

        Args:
            token_ids: [T] int64.
            positions: [T] int64, each token's position in its own request.
            backend: called once per layer with the step's queries and new rows.
            select: [S] int64, the rows whose logits are wanted (the last of each request); None: all T.

        Returns:
            [S, vocab] float32 logits, equal on every rank.
        """
        hidden = self.hidden(token_ids, positions, backend)
        return self.logits(hidden if select is None else hidden.index_select(0, select))

    @torch.no_grad()
    def hidden(self, token_ids: Tensor, positions: Tensor, backend: AttentionBackend) -> Tensor:
        """[T, H] hidden states behind the last layer and norm, equal on every rank; arguments as for `forward`."""
        hidden = F.embedding(token_ids, self.weights.embed)
        for index, layer in enumerate(self.weights.layers):
            hidden = self.run_layer(index, layer, hidden, positions, backend)
        return rms_norm(hidden, self.weights.norm, self.config.rms_norm_eps)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, vocab] float32 of the [S, H] hidden states that `hidden` returned."""
        return F.linear(hidden, self.weights.lm_head).to(torch.float32)

    def run_layer(
        self,
        index: int,
        layer: LayerWeights,
        hidden: Tensor,
        positions: Tensor,
        backend: AttentionBackend,
        *,
        selects: bool = True,
    ) -> Tensor:
        """[T, H] -> [T, H]: one layer; the backend is called once, with `index`, and without `selects` as if the layer
        had no indexer."""
        cos, sin = self._rope.at(positions)
        normed = rms_norm(hidden, layer.input_norm, self.config.rms_norm_eps)
        hidden = hidden + self._attention(index, layer.attention, normed, cos, sin, backend, selects)
        normed = rms_norm(hidden, layer.post_attention_norm, self.config.rms_norm_eps)
        if isinstance(layer.mlp, MoeWeights):
            output = mixture(normed, layer.mlp, self.config)
        else:
            output = swiglu(normed, layer.mlp)
        return hidden + self._group.all_reduce(output)

    def kv_rows(self, layer: LayerWeights, hidden: Tensor, positions: Tensor) -> KvRows:
        """What `layer` caches of its input `hidden` [T, H], without computing the rest of it."""
        cos, sin = self._rope.at(positions)
        normed, weights = rms_norm(hidden, layer.input_norm, self.config.rms_norm_eps), layer.attention
        key = None if weights.indexer is None else self._index_key(weights.indexer, normed, cos, sin)
        return KvRows(*self._main_rows(weights, normed, cos, sin), key)

    def _attention(
        self,
        index: int,
        weights: AttentionWeights,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        backend: AttentionBackend,
        selects: bool,
    ) -> Tensor:
        """Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
        c = self.config
        tokens = x.shape[0]
        q_latent = rms_norm(F.linear(x, weights.q_a_proj), weights.q_a_norm, LORA_NORM_EPS)
        q = F.linear(q_latent, weights.q_b_proj).view(tokens, self._local_heads, c.qk_head_dim)
        q_nope, q_rope = q[..., : c.qk_nope_head_dim], q[..., c.qk_nope_head_dim :]
        ckv, k_rope = self._main_rows(weights, x, cos, sin)
        attended = backend.attend(
            index,
            q_nope=torch.bmm(q_nope.transpose(0, 1), weights.w_uk).transpose(0, 1).contiguous(),
            q_rope=rotate(q_rope, cos[:, None], sin[:, None], interleaved=True),
            ckv=ckv,
            k_rope=k_rope,
            indexer=self._index(weights.indexer, x, q_latent, cos, sin) if weights.indexer and selects else None,
        )
        values = torch.bmm(attended.transpose(0, 1), weights.w_uv).transpose(0, 1)
        return self._group.all_reduce(F.linear(values.reshape(tokens, -1), weights.o_proj))

    def _main_rows(self, weights: AttentionWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = F.linear(x, weights.kv_a_proj).split_with_sizes(
            (self.config.kv_lora_rank, self.config.qk_rope_head_dim), dim=-1
        )
        return rms_norm(latent, weights.kv_a_norm, LORA_NORM_EPS), rotate(k_rope, cos, sin, interleaved=True)

    def _index(self, weights: IndexerWeights, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor) -> IndexerQuery:
        """Lightning indexer (DeepSeek-V3.2, equation 1); the first rope dims of queries and keys are rotated."""
        c = self.config
        dim = c.index_head_dim
        q = F.linear(q_latent, weights.wq_b).view(x.shape[0], c.index_n_heads, dim)
        w = F.linear(x, weights.weights_proj).to(torch.float32) * (c.index_n_heads**-0.5 * dim**-0.5)
        return IndexerQuery(self._rotate_head(q, cos[:, None], sin[:, None]), self._index_key(weights, x, cos, sin), w)

    def _index_key(self, weights: IndexerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        dim = (self.config.index_head_dim,)
        k = F.layer_norm(F.linear(x, weights.wk), dim, weights.k_norm_weight, weights.k_norm_bias, _INDEX_NORM_EPS)
        return self._rotate_head(k, cos, sin)

    def _rotate_head(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rope_dim = self.config.qk_rope_head_dim
        rotated = rotate(x[..., :rope_dim], cos, sin, self.config.indexer_rope_interleave)
        return torch.cat((rotated, x[..., rope_dim:]), dim=-1)
