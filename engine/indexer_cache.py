"""One layer's index keys in device memory, in the model's dtype or quantised to int8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.attention import IndexerQuery
from engine.ops import hadamard_quantise, lightning_indexer, quant_lightning_indexer


class IndexOperands(NamedTuple):
    """Queries of T tokens and the keys they are scored with; scales are None unless both are int8."""

    weights: Tensor  # [T, Hi] float32
    query: Tensor  # [T, Hi, D] model dtype or int8
    query_scale: Tensor | None  # [T, Hi] float16
    keys: Tensor  # [blocks, block_size, 1, D], dtype of the query
    key_scale: Tensor | None  # [blocks, block_size, 1] float16


@dataclass(frozen=True)
class IndexerCache:
    """Paged keys of all tokens, and the selection over them.

    With scales the keys are int8 ("LIC8"): rows are rotated and rounded when they are written, queries when they
    select. Which of the two it is does not show outside: `write` and `select` take what the model computed.
    """

    keys: Tensor  # [blocks, block_size, 1, D], model dtype or int8
    scales: Tensor | None = None  # [blocks, block_size, 1] float16, of int8 keys

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order in which a block's bytes are stored and sent."""
        return (self.keys,) if self.scales is None else (self.keys, self.scales)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Caches `rows` [T, D], in the model's dtype, at `slots` [T] int64 = block * block_size + offset."""
        if self.scales is not None:
            rows, scales = hadamard_quantise(rows)
            self.scales.view(-1).index_copy_(0, slots, scales)
        self.keys.view(-1, rows.shape[-1]).index_copy_(0, slots, rows)

    def select(
        self, query: IndexerQuery, block_table: Tensor, query_ends: Tensor, key_lens: Tensor, topk: int
    ) -> Tensor:
        """[T, topk] int32 positions of the best keys of each row; see `engine.ops.lightning_indexer`."""
        given = self.operands(query)
        lengths = block_table, query_ends, key_lens, topk
        if given.query_scale is None or given.key_scale is None:
            return lightning_indexer(given.query, given.weights, given.keys, *lengths)
        return quant_lightning_indexer(
            *(given.query, given.weights, given.query_scale, given.keys, given.key_scale, *lengths)
        )

    def operands(self, query: IndexerQuery) -> IndexOperands:
        """What an operator is given to score `query` with these keys."""
        if self.scales is None:
            return IndexOperands(query.w, query.q, None, self.keys, None)
        levels, scales = hadamard_quantise(query.q)
        return IndexOperands(_raw_weights(query), levels, scales, self.keys, self.scales)


def _raw_weights(query: IndexerQuery) -> Tensor:
    """[T, Hi] float32 without the constant Hi^-0.5 * Di^-0.5, which would waste the float16 they are rounded to."""
    heads, dims = query.q.shape[1:]
    return query.w * torch.tensor(float(heads * dims)).sqrt()
