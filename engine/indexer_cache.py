"""One layer's index keys in device memory, in the model's dtype or quantised to int8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.attention import IndexerQuery
from engine.ops import hadamard_quantise, lightning_indexer, quant_lightning_indexer


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
        if self.scales is None:
            return lightning_indexer(query.q, query.w, self.keys, block_table, query_ends, key_lens, topk)
        levels, scales = hadamard_quantise(query.q)
        return quant_lightning_indexer(
            levels,
            _raw_weights(query),
            scales,
            self.keys,
            self.scales,
            block_table,
            query_ends,
            key_lens,
            topk,
        )


def _raw_weights(query: IndexerQuery) -> Tensor:
    """[T, Hi] float32 without the constant Hi^-0.5 * Di^-0.5, which would waste the float16 they are rounded to."""
    heads, dims = query.q.shape[1:]
    return query.w * torch.tensor(float(heads * dims)).sqrt()
