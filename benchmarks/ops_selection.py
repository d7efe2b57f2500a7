"""Two ways to the same picks and slots: LIM with the exact tail, against the plain indexer with LRU residency.

The decode loop takes the second (`decode_node/backend.py`): this part says what that costs or saves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import Row, slowdown_row, time_in_turns
from benchmarks.ops_lim import BLOCK, TOPK, LimBench, LimShape, i32
from engine.ops import (
    Residency,
    ResidencyState,
    fused_lightning_indexer_manage,
    fused_quant_lightning_indexer_manage,
    lightning_indexer,
    lru_residency,
    quant_lightning_indexer,
    select_with_tail,
)

SHAPES = (
    LimShape(64, 8192),
    LimShape(64, 8192, batch=8),
    LimShape(64, 131072),
    LimShape(32, 8192),
    LimShape(32, 131072, rows=4),
    LimShape(64, 131072, int8=True),
)


class SelectionBench(LimBench):
    """`LimBench`'s requests; both ways keep a state of their own over the same hot capacity."""

    def __init__(self, shape: LimShape) -> None:
        super().__init__(shape)
        self._scores = torch.empty(self.out[0].shape, dtype=torch.float32)
        self._steady = i32([-1] * shape.batch)
        self._residency = ResidencyState.empty(shape.batch, shape.capacity)
        self._found = Residency.empty(shape.batch * shape.rows, TOPK, shape.batch, shape.rows)
        self._sealed, self._generations = self.lens - shape.rows, torch.ones(shape.batch, dtype=torch.int64)
        self._float_weights = self.weights.float()

    def managed(self, step: int) -> Tensor:
        """[rows, 1, TOPK] picks by LIM over the stable prefix, and the exact top-k of these and the tail."""
        query, scale = self._query(step)
        int8 = self.shape.int8
        operator = fused_quant_lightning_indexer_manage if int8 else fused_lightning_indexer_manage
        lengths = self.ends, self.lens, self.stable, self.capacity, self._steady
        operator(
            *(self.weights, scale, query, self.key_scale, self.keys, self.table, *lengths),
            *(self.entries, self.pool, *self.out, self._scores),
        )
        scales = (scale, self.key_scale) if int8 else (None, None)
        picks, _ = select_with_tail(
            *(self.weights, query, self.keys, self.table, *lengths, *self.out[:2], self._scores, *scales)
        )
        return picks

    def separate(self, step: int) -> Tensor:
        """[rows, TOPK] picks by the plain indexer; residency finds their slots."""
        query, scale = self._query(step)
        lengths = self.table, self.ends, self.lens, TOPK
        if self.shape.int8:
            picks = quant_lightning_indexer(query, self._float_weights, scale, self.keys, self.key_scale, *lengths)
        else:
            picks = lightning_indexer(query, self._float_weights, self.keys, *lengths)
        state, found = self._residency, self._found
        lru_residency(picks, self._sealed, self._generations, self.entries, state, found, query_ends=self.ends)
        return picks

    def check(self) -> None:
        """RuntimeError unless both ways pick the same."""
        if not torch.equal(self.managed(1)[:, 0].sort().values, self.separate(1).sort().values):
            raise RuntimeError(f"{self.shape.label}: LIM with the tail and the plain indexer differ in their picks")


def run(now: Callable[[], float], budget_s: float) -> list[Row]:
    """Rows for all shapes; `budget_s` for each, timed with `now`."""
    rows = []
    for shape in SHAPES:
        bench = SelectionBench(shape)
        bench.check()
        pair = time_in_turns(bench.managed, bench.separate, budget_s=budget_s, now=now)
        note = f"equal picks; C {shape.capacity}, tail of {BLOCK}"
        rows.append(
            slowdown_row(f"selection, {shape.label} and the exact tail: over indexer and residency", pair, None, note)
        )
    return rows
