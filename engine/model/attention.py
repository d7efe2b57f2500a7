"""The seam between the decoder, which computes, and the node, which owns the KV cache."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class IndexerQuery(NamedTuple):
    """What one layer's lightning indexer produced for the T tokens of a step.

    The score of cached position s for token t is sum_h w[t, h] * relu(q[t, h] . k[s]); it is computed in float32.
    """

    q: Tensor  # [T, Hi, Di] model dtype, rotated
    k: Tensor  # [T, Di] model dtype, normed and rotated: the rows to cache
    w: Tensor  # [T, Hi] float32, times Hi^-0.5 * Di^-0.5 (positive constants that leave the order unchanged)


class AttentionBackend(Protocol):
    """Owns the caches; called once per layer, in order of layers, within each `DsaDecoder.forward`."""

    def attend(
        self,
        layer: int,
        q_nope: Tensor,
        q_rope: Tensor,
        ckv: Tensor,
        k_rope: Tensor,
        indexer: IndexerQuery | None,
    ) -> Tensor:
        """Cache the step's rows, select each token's top-k and attend to them, causally within its request.

        T tokens, N local heads, L kv_lora_rank, R rope dims; all tensors contiguous, in the model's dtype.

        Args:
            layer: index of the layer, 0 .. num_hidden_layers - 1.
            q_nope: [T, N, L] queries already multiplied by W_UK.
            q_rope: [T, N, R] rotated.
            ckv: [T, L] normed latents: with `k_rope` the main-KV rows to cache.
            k_rope: [T, R] rotated, shared by all heads.
            indexer: None on a layer that reuses the selection of `config.index_owners[layer]`.

        Returns:
            [T, N, L]: softmax(config.softmax_scale * (q . k)) over the selected rows, times their latents.
        """
