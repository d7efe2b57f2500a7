"""LIM and LIM C8 against the plain indexers, which only select."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import Pair, Row, rate_row, slowdown_row, time_in_turns
from engine.ops import (
    NO_SLOT,
    fused_lightning_indexer_manage,
    fused_quant_lightning_indexer_manage,
    hadamard_quantise,
    lightning_indexer,
    quant_lightning_indexer,
)

TOPK, BLOCK, DIMS = 2048, 128, 128
_MISSES = 32768
_STEPS = 6  # different queries, walked back and forth
_DRIFT = 0.1  # how much of a query is new in each step


@dataclass(frozen=True)
class LimShape:
    """`rows` query rows per request; `context` keys per request, of which all but the last block are stable."""

    heads: int
    context: int
    batch: int = 1
    rows: int = 1
    int8: bool = False

    @property
    def label(self) -> str:
        """For result rows."""
        kind = "LIM C8" if self.int8 else "LIM"
        return f"{kind} {self.heads} heads, {self.context // 1024}K, batch {self.batch}, Q {self.rows}"

    @property
    def stable(self) -> int:
        """L."""
        return self.context - BLOCK

    @property
    def capacity(self) -> int:
        """C: the smallest legal one or twice the rows' top-k, whichever fits."""
        return self.stable if self.stable <= self.rows * TOPK else min(2 * self.rows * TOPK, 32640, self.stable)


SHAPES = (
    LimShape(64, 8192),
    LimShape(64, 8192, batch=24),
    LimShape(64, 8192, rows=6),
    LimShape(64, 32768, batch=4, rows=2),
    LimShape(64, 131072),
    LimShape(64, 131072, rows=4),
    LimShape(32, 8192),
    LimShape(32, 32768, batch=8),
    LimShape(32, 131072, rows=2),
    LimShape(64, 8192, int8=True),
    LimShape(64, 131072, int8=True),
    LimShape(32, 32768, rows=2, int8=True),
)


def i32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class LimBench:
    """Requests in steady decode; each step's queries differ a little from those of the step before."""

    def __init__(self, shape: LimShape) -> None:
        self.shape = shape
        rng = torch.Generator().manual_seed(1)
        total, blocks = shape.batch * shape.rows, shape.context // BLOCK
        walk = [torch.randn(total, shape.heads, DIMS, generator=rng)]
        for _ in range(_STEPS - 1):
            fresh = torch.randn(walk[0].shape, generator=rng)
            walk.append((1 - _DRIFT**2) ** 0.5 * walk[-1] + _DRIFT * fresh)
        keys = torch.randn(shape.batch * blocks, BLOCK, 1, DIMS, generator=rng).bfloat16()
        self.weights = torch.rand(total, shape.heads, generator=rng).bfloat16()
        if shape.int8:
            self.keys, scale = hadamard_quantise(keys)
            self.queries = [hadamard_quantise(q.bfloat16()) for q in walk]
            self.key_scale = scale
        else:
            ones = torch.ones(total, shape.heads)
            self.keys, self.queries = keys, [(q.bfloat16(), ones) for q in walk]
            self.key_scale = torch.ones(shape.batch * blocks, BLOCK, 1)
        self.table = torch.randperm(shape.batch * blocks, generator=rng).int().view(shape.batch, blocks)
        self.ends = i32([shape.rows * (i + 1) for i in range(shape.batch)])
        self.lens = i32([shape.context] * shape.batch)
        self.stable, self.capacity = i32([shape.stable] * shape.batch), i32([shape.capacity] * shape.batch)
        self.entries = torch.arange(shape.batch).int()
        self.pool = torch.full((shape.batch, shape.context), NO_SLOT, dtype=torch.int32)
        self.out = [torch.empty(total, 1, TOPK, dtype=torch.int32) for _ in range(2)]
        self.out.append(torch.empty(total, dtype=torch.int32))
        self.out += [torch.empty(shape.batch, _MISSES, dtype=torch.int32) for _ in range(2)]
        self.out.append(torch.empty(shape.batch, dtype=torch.int32))
        self.misses: list[float] = []
        self.manage(0, state=-2)

    def _query(self, step: int) -> tuple[Tensor, Tensor]:
        turn = step % (2 * _STEPS - 2)
        return self.queries[min(turn, 2 * _STEPS - 2 - turn)]

    def manage(self, step: int, state: int = -1) -> None:
        """One fused call."""
        query, scale = self._query(step)
        operator = fused_quant_lightning_indexer_manage if self.shape.int8 else fused_lightning_indexer_manage
        operator(
            *(self.weights, scale, query, self.key_scale, self.keys, self.table, self.ends, self.lens),
            *(self.stable, self.capacity, i32([state] * self.shape.batch), self.entries, self.pool, *self.out),
        )

    def select(self, step: int) -> None:
        """One plain call."""
        query, scale = self._query(step)
        lengths = self.table, self.ends, self.lens, TOPK
        if self.shape.int8:
            quant_lightning_indexer(query, self.weights, scale, self.keys, self.key_scale, *lengths)
        else:
            lightning_indexer(query, self.weights, self.keys, *lengths)

    def miss_share(self) -> float:
        """Share of the union of a step's top-k that was not resident, over one walk."""
        shares = []
        for step in range(2 * _STEPS - 2):
            self.manage(step)
            selected = sum(len(rows.unique()) for rows in self.out[0].view(self.shape.batch, -1))
            shares.append(int(self.out[-1].sum()) / selected)
        return sum(shares) / len(shares)


def run(now: Callable[[], float], budget_s: float, gemm_rate: float) -> list[Row]:
    """Rows for all shapes; `budget_s` for each, timed with `now`.

    `gemm_rate` in GFLOP/s is what plain bfloat16 GEMM reaches.
    """
    rows = []
    for shape in SHAPES:
        bench = LimBench(shape)
        misses = bench.miss_share()
        pair = time_in_turns(partial(bench.manage), partial(bench.select), budget_s=budget_s, now=now)
        note = f"{misses:.0%} of the top-k missed, C {shape.capacity}"
        rows.append(slowdown_row(f"{shape.label}: over plain indexer", pair, 1.10, note))
        rows += _rates(shape, pair, gemm_rate)
    return rows


def _rates(shape: LimShape, pair: Pair, gemm_rate: float) -> list[Row]:
    products = 2 * shape.batch * shape.rows * shape.heads * DIMS * shape.stable
    note = "of bfloat16 GEMM" + (", counting int8 operations" if shape.int8 else "")
    return [rate_row(f"{shape.label}: index scores", products, pair.subject, "GFLOP/s", gemm_rate, note)]
