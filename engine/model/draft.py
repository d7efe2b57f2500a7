"""Multi-token prediction: one more layer that guesses the token after next."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.attention import AttentionBackend
from engine.model.decoder import DsaDecoder, KvRows
from engine.model.layers import rms_norm


class DraftLayer:
    """The first multi-token-prediction layer (DeepSeek-V3, arXiv 2412.19437, section 2.2), behind a decoder's layers.

    Its row of position p combines the hidden state of p with the token at p + 1 and predicts the token at p + 2. It
    has KV of its own, at the same positions as the other layers. As a row depends on the token behind it, the last row
    of a block belongs to one continuation; behind another one it is only a worse guess, and guesses are verified.
    Further layers of a checkpoint, which no released one has, are not used: this one drafts as often as it is asked to.
    """

    def __init__(self, decoder: DsaDecoder) -> None:
        """Raises ValueError when `decoder` was loaded without its draft layer (`ModelConfig.with_draft`)."""
        if decoder.weights.draft is None:
            raise ValueError("the decoder's weights hold no multi-token-prediction layer; load them with_draft()")
        self._decoder = decoder
        self._weights = decoder.weights.draft
        self._eps = decoder.config.rms_norm_eps
        self.shares_topk = decoder.config.drafts_share_topk
        """Whether all drafts of a step attend to the first one's top-k (GLM-5.2, index_share_for_mtp_iteration)."""
        self.layer = decoder.config.num_hidden_layers
        """Its number among the layers with KV."""

    @torch.no_grad()
    def kv_rows(self, hidden: Tensor, next_tokens: Tensor, positions: Tensor) -> KvRows:
        """The rows to cache, without attention: all that is needed of a prompt.

        Args:
            hidden: [T, H] `DsaDecoder.hidden` of the positions.
            next_tokens: [T] int64, the token behind each position.
            positions: [T] int64.
        """
        return self._decoder.kv_rows(self._weights.layer, self._combine(hidden, next_tokens), positions)

    @torch.no_grad()
    def hidden(
        self,
        hidden: Tensor,
        next_tokens: Tensor,
        positions: Tensor,
        backend: AttentionBackend,
        *,
        selects: bool = True,
    ) -> Tensor:
        """[T, H]: like `DsaDecoder.hidden` of the next positions, so that it can be fed back for one more guess.

        Arguments as for `kv_rows`; `backend` is called once, with the layer's number. Without `selects` the layer's
        indexer does not run: the backend knows what to attend to.
        """
        combined = self._combine(hidden, next_tokens)
        layer = self._weights.layer
        output = self._decoder.run_layer(self.layer, layer, combined, positions, backend, selects=selects)
        return rms_norm(output, self._weights.norm, self._eps)

    @torch.no_grad()
    def guess(self, hidden: Tensor) -> Tensor:
        """[T] int64, the most probable token behind next, for the [T, H] this layer's `hidden` returned."""
        return F.linear(hidden, self._weights.lm_head).argmax(-1)

    def _combine(self, hidden: Tensor, next_tokens: Tensor) -> Tensor:
        embedded = rms_norm(F.embedding(next_tokens, self._weights.embed), self._weights.embed_norm, self._eps)
        return F.linear(
            torch.cat((embedded, rms_norm(hidden, self._weights.hidden_norm, self._eps)), dim=-1), self._weights.project
        )
