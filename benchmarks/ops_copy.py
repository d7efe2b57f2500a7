"""Copy-SFA against its halves done apart: all copies first, then attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.harness import Row, rate_row, speedup_row, time_alone, time_in_turns
from benchmarks.ops_lim import i32
from engine.ops import fused_scatter_copy_sparse_flash_attention

TOPK, BLOCK, LATENT, ROPE = 2048, 128, 512, 64
ROW_BYTES = (LATENT + ROPE) * 2
_LAYERS_BYTES = 96 << 20  # of hot buffers, walked through so that they do not stay in the processor's caches
_VARIANTS = 4  # different selections


@dataclass(frozen=True)
class CopyShape:
    """`miss_share` of each request's top-k is fetched from a host pool of `context` rows per request."""

    heads: int
    miss_share: float
    batch: int = 1
    rows: int = 1
    context: int = 131072

    @property
    def label(self) -> str:
        """For result rows."""
        shape = f"{self.heads} heads, {self.context // 1024}K, batch {self.batch}, Q {self.rows}"
        return f"Copy-SFA {shape}, {self.miss_share:.0%} misses"


SHAPES = (
    CopyShape(128, 0.1),
    CopyShape(128, 1.0),
    CopyShape(128, 0.1, batch=8, context=8192),
    CopyShape(128, 0.1, rows=4),
    CopyShape(64, 0.1),
    CopyShape(64, 0.5, batch=4, context=32768),
    CopyShape(64, 0.1, batch=24, context=8192),
    CopyShape(16, 0.1),
    CopyShape(16, 0.5),
    CopyShape(16, 1.0, batch=4, context=32768),
    CopyShape(8, 0.5),
)


class CopyBench:
    """Requests whose rows select alike (as rows of a speculative step do, more or less), over many layers."""

    def __init__(self, shape: CopyShape) -> None:
        self.shape = shape
        rng = torch.Generator().manual_seed(2)
        total, batch = shape.batch * shape.rows, shape.batch
        capacity = 2 * TOPK
        blocks = (capacity + 2 * BLOCK) // BLOCK
        layers = max(1, _LAYERS_BYTES // (batch * blocks * BLOCK * ROW_BYTES))
        self.query = torch.randn(total, shape.heads, LATENT, generator=rng).bfloat16()
        self.query_rope = torch.randn(total, shape.heads, ROPE, generator=rng).bfloat16()
        self.out = torch.empty_like(self.query)
        hot = torch.randn(1, BLOCK, 1, LATENT + ROPE, generator=rng).bfloat16()
        sizes = layers, batch * blocks, BLOCK, 1
        self.hot_ckv = hot[..., :LATENT].expand(*sizes, LATENT).clone()
        self.hot_rope = hot[..., LATENT:].expand(*sizes, ROPE).clone()
        host_blocks = batch * shape.context // BLOCK
        self.host_ckv = torch.full((host_blocks, BLOCK, LATENT), 0.25, dtype=torch.bfloat16)
        self.host_rope = torch.full((host_blocks, BLOCK, ROPE), 0.5, dtype=torch.bfloat16)
        self.hot_table = torch.arange(batch * blocks).int().view(batch, blocks)
        self.host_table = torch.randperm(host_blocks, generator=rng).int().view(batch, -1)
        self.ends = i32([shape.rows * (i + 1) for i in range(batch)])
        self.kept = i32([capacity] * batch)
        self.no_rows, self.no_misses = i32([0] * batch), i32([0] * total)
        self.misses = i32([round(TOPK * shape.miss_share)] * batch)
        self.variants = []
        for _ in range(_VARIANTS):
            slots = torch.stack([torch.randperm(capacity, generator=rng)[:TOPK] for _ in range(batch)]).int()
            ids = torch.stack([torch.randperm(shape.context, generator=rng)[:TOPK] for _ in range(batch)]).int()
            per_row = [side.repeat_interleave(shape.rows, 0).unsqueeze(1) for side in (slots, ids)]
            self.variants.append((slots, ids, *per_row))

    def _call(self, run: int, *, copy: bool, attend: bool) -> None:
        slots, ids, row_slots, row_ids = self.variants[run % _VARIANTS]
        layer = run % len(self.hot_ckv)
        fused_scatter_copy_sparse_flash_attention(
            *(self.query_rope, self.query, self.ends),
            self.kept if attend else self.no_rows,  # a length of 0 is an inactive request: copies only
            *(self.kept, row_slots, row_ids, self.no_misses, ids, slots, self.misses if copy else self.no_rows),
            *(self.hot_table, self.host_table, self.hot_rope[layer], self.hot_ckv[layer]),
            *(self.host_rope, self.host_ckv, 0.07, self.out),
        )

    def fused(self, run: int) -> None:
        """One call of the operator."""
        self._call(run, copy=True, attend=True)

    def copy(self, run: int) -> None:
        """The copies alone."""
        self._call(run, copy=True, attend=False)

    def attend(self, run: int) -> None:
        """Attention alone."""
        self._call(run, copy=False, attend=True)

    def with_torch(self, run: int) -> None:
        """The same with torch: index the misses over, gather the selection, bfloat16 matrix products and softmax."""
        slots, ids, *_ = self.variants[run % _VARIANTS]
        layer, per_row = run % len(self.hot_ckv), self.shape.rows
        hot = [cache[layer].flatten(0, 2) for cache in (self.hot_ckv, self.hot_rope)]
        for i, misses in enumerate(self.misses.tolist()):
            chosen, fetched = slots[i].long(), ids[i, :misses].long()
            at = self.hot_table[i].long()[chosen // BLOCK] * BLOCK + chosen % BLOCK
            source = self.host_table[i].long()[fetched // BLOCK] * BLOCK + fetched % BLOCK
            for cache, pool in zip(hot, (self.host_ckv, self.host_rope), strict=True):
                cache.index_copy_(0, at[:misses], pool.flatten(0, 1)[source])
            ckv, k_rope = (cache[at] for cache in hot)
            span = slice(i * per_row, (i + 1) * per_row)
            scores = self.query[span] @ ckv.T + self.query_rope[span] @ k_rope.T
            self.out[span] = torch.softmax(scores.float() * 0.07, -1).bfloat16() @ ckv

    def apart(self, run: int) -> None:
        """Copies, then attention."""
        self.copy(run)
        self.attend(run)


def run(now: Callable[[], float], budget_s: float, gemm_rate: float, copy_rate: float) -> list[Row]:
    """Rows for all shapes; `budget_s` for each, timed with `now`.

    Rates, in GFLOP/s and GB/s, are what GEMM and memcpy reach.
    """
    rows = []
    for shape in SHAPES:
        bench = CopyBench(shape)
        pair = time_in_turns(bench.fused, bench.apart, budget_s=budget_s, now=now)
        halves = time_in_turns(bench.copy, bench.attend, budget_s=budget_s / 3, now=now)
        copying = halves.ratio.median / (1 + halves.ratio.median)
        ceiling = 1 / max(1 - copying, copying)
        note = f"copies are {copying:.0%} of the time apart: perfect overlap would give {ceiling:.2f}x"
        rows.append(speedup_row(f"{shape.label}: over copy, then attention", pair, 1.25, note))
        torch_pair = time_in_turns(bench.fused, bench.with_torch, budget_s=budget_s / 2, now=now)
        rows.append(speedup_row(f"{shape.label}: over torch's copy, gather, GEMM and softmax", torch_pair, None))
        total = shape.batch * shape.rows
        products = 2 * total * shape.heads * TOPK * (2 * LATENT + ROPE)
        rows.append(rate_row(f"{shape.label}: attention", products, halves.baseline, "GFLOP/s", gemm_rate, "of GEMM"))
        moved = 2 * int(bench.misses.sum()) * ROW_BYTES  # read and written
        rows.append(rate_row(f"{shape.label}: copies", moved, halves.subject, "GB/s", copy_rate, "of memcpy"))
    return rows


def machine_rates(now: Callable[[], float], budget_s: float) -> tuple[list[Row], float, float]:
    """Rows for GEMM and memcpy, and their rates in GFLOP/s and GB/s (bytes read and written)."""
    size, count = 2048, 64 << 20
    a, b = torch.randn(size, size).bfloat16(), torch.randn(size, size).bfloat16()
    source, target = torch.ones(count, dtype=torch.int32), torch.empty(count, dtype=torch.int32)
    gemm = time_alone(lambda: a @ b, budget_s=budget_s, now=now)
    copy = time_alone(lambda: target.copy_(source), budget_s=budget_s, now=now)
    rows = [
        rate_row("torch GEMM, bfloat16, 2048 x 2048 x 2048", 2 * size**3, gemm, "GFLOP/s"),
        rate_row("memcpy, 256 MiB", 2 * 4 * count, copy, "GB/s"),
    ]
    return rows, rows[0].value, rows[1].value
