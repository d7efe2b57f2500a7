"""A plain dense attention backend that keeps every row, to check the decoder without paging or native operators."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.attention import IndexerQuery
from engine.model.config import ModelConfig


class DenseBackend:
    """Serves several requests at once: `begin` names the request of every token of the coming step.

    Rows of a request must arrive in order of position. Top-k ties go to the lowest position.

    `margin` is the smallest distance so far between the last index score selected and the first one not. Where it is
    within rounding (below some 1e-6), correct programs may select different rows, and then their logits differ.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._main: dict[tuple[int, str], Tensor] = {}
        self._index: dict[tuple[int, str], Tensor] = {}
        self._selected: dict[int, list[Tensor]] = {}
        self._spans: list[tuple[str, int]] = []
        self.margin = float("inf")

    def begin(self, spans: list[tuple[str, int]]) -> None:
        """The coming step packs, in this order, so many tokens of each named request."""
        self._spans = spans

    def attend(
        self,
        layer: int,
        q_nope: Tensor,
        q_rope: Tensor,
        ckv: Tensor,
        k_rope: Tensor,
        indexer: IndexerQuery | None,
    ) -> Tensor:
        """See AttentionBackend."""
        if indexer is not None:
            self._selected[layer] = self._select(layer, indexer)
        masks = self._selected[self._config.index_owners[layer]]
        outputs, start = [], 0
        for (request, count), mask in zip(self._spans, masks, strict=True):
            part = slice(start, start + count)
            rows = _append(self._main, (layer, request), torch.cat((ckv[part], k_rope[part]), dim=-1))
            query = torch.cat((q_nope[part], q_rope[part]), dim=-1)
            scores = torch.einsum("tnd,sd->tns", query.float(), rows.float()) * self._config.softmax_scale
            weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
            outputs.append(torch.einsum("tns,sl->tnl", weights, rows[:, : ckv.shape[1]].float()))
            start += count
        return torch.cat(outputs).to(ckv.dtype)

    def _select(self, layer: int, indexer: IndexerQuery) -> list[Tensor]:
        """Per request a mask [tokens, rows] of the rows each token attends to."""
        masks, start = [], 0
        for request, count in self._spans:
            part = slice(start, start + count)
            keys = _append(self._index, (layer, request), indexer.k[part]).float()
            scores = torch.einsum("thd,sd->ths", indexer.q[part].float(), keys).relu()
            scores = torch.einsum("ths,th->ts", scores, indexer.w[part].float())
            total = keys.shape[0]
            future = torch.arange(total) > torch.arange(total - count, total)[:, None]
            best, ranked = scores.masked_fill(future, float("-inf")).sort(dim=-1, descending=True, stable=True)
            topk = self._config.index_topk
            if total > topk:
                crowded = (~future).sum(-1) > topk
                self.margin = min([self.margin, *(best[crowded, topk - 1] - best[crowded, topk]).tolist()])
            masks.append(torch.zeros_like(future).scatter_(1, ranked[:, :topk], True) & ~future)
            start += count
        return masks


def _append(store: dict[tuple[int, str], Tensor], key: tuple[int, str], rows: Tensor) -> Tensor:
    store[key] = torch.cat((store[key], rows)) if key in store else rows
    return store[key]
