"""The fused operators at the sizes of real models and at the edges of what the Ascend operators take.

Index queries are unit vectors, one per row, so that key s has score key[s, r] for row r and any top-k can be dictated:
results are compared with sets and maps written down here, not with another selection.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops import (
    NO_SLOT,
    fused_lightning_indexer_manage,
    fused_quant_lightning_indexer_manage,
    fused_scatter_copy_sparse_flash_attention,
)
from tests.ops.paged_case import generator, i32, random_tables

TOPK, BLOCK, MISSES, POISON = 2048, 128, 32768, 54321


class Request:
    """One request of `rows` rows over `stable` searchable positions with the top-k of each row dictated."""

    def __init__(
        self, chosen: list[Tensor], stable: int, capacity: int, *, int8: bool = False, width: int = 0, seed: int = 0
    ) -> None:
        rng, self.rows = generator(seed), len(chosen)
        self.chosen, self.stable, self.capacity, self.int8 = chosen, stable, capacity, int8
        self.keys = stable + BLOCK + self.rows - 1
        table, blocks = random_tables([self.keys], BLOCK, rng)
        width = max(width, -(-self.keys // BLOCK))
        scores = torch.randint(0, 51, (self.keys, self.rows), generator=rng)
        for row, positions in enumerate(chosen):
            scores[positions, row] = torch.randint(60, 127, positions.shape, generator=rng)
        if int8:
            scores = torch.nn.functional.pad(scores, (0, -self.rows % 4))
        dims = scores.shape[1]
        at = table[0, torch.arange(self.keys) // BLOCK].long() * BLOCK + torch.arange(self.keys) % BLOCK
        cache = torch.zeros(blocks * BLOCK, dims, dtype=torch.int8 if int8 else torch.float32)
        cache[at] = scores.to(cache.dtype)
        scale, ones = (torch.float16, 0.5) if int8 else (torch.float32, 1.0)
        self.inputs = (
            torch.ones(self.rows, 1),
            torch.full((self.rows, 1), ones, dtype=scale),
            torch.eye(self.rows, dims).unsqueeze(1).mul(100 if int8 else 1).to(cache.dtype),
            torch.full((blocks, BLOCK, 1), ones, dtype=scale),
            cache.view(blocks, BLOCK, 1, dims),
            torch.nn.functional.pad(table, (0, width - table.shape[1]), value=-1).contiguous(),
            *(i32([n]) for n in (self.rows, self.keys, stable, capacity)),
        )
        self.pool = torch.full((3, width * BLOCK), NO_SLOT, dtype=torch.int32)

    def run(self, state: int) -> dict[str, Tensor]:
        """One call on pool row 1, with poisoned outputs."""
        before = self.pool.clone()
        out = {
            "ids": torch.full((self.rows, 1, TOPK), POISON, dtype=torch.int32),
            "slots": torch.full((self.rows, 1, TOPK), POISON, dtype=torch.int32),
            "row_misses": torch.full((self.rows,), POISON, dtype=torch.int32),
            "miss_ids": torch.full((1, MISSES), POISON, dtype=torch.int32),
            "miss_slots": torch.full((1, MISSES), POISON, dtype=torch.int32),
            "misses": torch.full((1,), POISON, dtype=torch.int32),
        }
        operator = fused_quant_lightning_indexer_manage if self.int8 else fused_lightning_indexer_manage
        operator(*self.inputs, i32([state]), i32([1]), self.pool, *out.values())
        assert torch.equal(before[[0, 2]], self.pool[[0, 2]])
        return out

    def place(self, residents: Tensor) -> Tensor:
        """Make `residents`, C of them, resident in slots of random order; returns the row."""
        order = torch.randperm(self.capacity, generator=generator(5)).int()
        self.pool[1] = NO_SLOT
        self.pool[1, residents] = order
        return self.pool[1].clone()

    def check_steady(self, before: Tensor, out: dict[str, Tensor]) -> None:
        """The contract of state -1."""
        row, union = self.pool[1], torch.cat(self.chosen).unique()
        assert torch.equal(row[row >= 0].sort().values, torch.arange(self.capacity).int())
        assert bool((row[self.stable :] == NO_SLOT).all())
        wanted = union[before[union] < 0]
        count = int(out["misses"])
        assert torch.equal(out["miss_ids"][0, :count].long(), wanted)
        assert torch.equal(out["miss_slots"][0, :count], row[wanted])
        assert bool(out["miss_ids"][0, count:].eq(POISON).all() and out["miss_slots"][0, count:].eq(POISON).all())
        hits = union[before[union] >= 0]
        assert torch.equal(row[hits], before[hits])
        victims = ((before >= 0) & (row < 0)).nonzero().flatten()
        assert len(victims) == count and not bool(torch.isin(victims, union).any())
        for r, positions in enumerate(self.chosen):
            own = positions.sort().values
            missed = before[own] < 0
            expected = torch.cat([own[missed], own[~missed]])
            assert torch.equal(out["ids"][r, 0].long(), expected)
            assert torch.equal(out["slots"][r, 0], row[expected])
            assert int(out["row_misses"][r]) == int(missed.sum())

    def check_first(self, out: dict[str, Tensor]) -> None:
        """The contract of state -2."""
        union = torch.cat(self.chosen).unique()
        others = torch.ones(self.stable, dtype=torch.bool)
        others[union] = False
        filled = torch.cat([union, others.nonzero().flatten()[: self.capacity - len(union)]])
        assert int(out["misses"]) == self.capacity
        assert torch.equal(out["miss_ids"][0, : self.capacity].long(), filled)
        assert torch.equal(out["miss_slots"][0, : self.capacity], torch.arange(self.capacity).int())
        assert torch.equal(self.pool[1, filled], torch.arange(self.capacity).int())
        assert int((self.pool[1] >= 0).sum()) == self.capacity
        for r, positions in enumerate(self.chosen):
            own = positions.sort().values
            assert torch.equal(out["ids"][r, 0].long(), own) and int(out["row_misses"][r]) == TOPK
            assert torch.equal(out["slots"][r, 0], self.pool[1, own])


def disjoint(rows: int, stable: int, seed: int) -> list[Tensor]:
    """The top-k of `rows` rows, without a common position."""
    return list(torch.randperm(stable, generator=generator(seed))[: rows * TOPK].split(TOPK))


@pytest.mark.parametrize("int8", [False, True], ids=["LIM", "LIM C8"])
@pytest.mark.parametrize("misses", [0, 1, 2047, 2048, 2049, 4095, 4096, 4097, 6144])
def test_any_number_of_misses(misses: int, int8: bool) -> None:
    """Three rows with disjoint top-k: 0 to all 6144 of their union are missing."""
    stable, capacity = 32768, 12288
    chosen = disjoint(3, stable, misses)
    request = Request(chosen, stable, capacity, int8=int8, seed=misses)
    union = torch.cat(chosen)[torch.randperm(6144, generator=generator(1))]
    others = torch.ones(stable, dtype=torch.bool)
    others[union] = False
    rest = others.nonzero().flatten()
    spare = rest[torch.randperm(len(rest), generator=generator(2))]
    residents = torch.cat([union[misses:], spare])[:capacity]
    before = request.place(residents)
    out = request.run(-1)
    assert int(out["misses"]) == misses
    request.check_steady(before, out)


@pytest.mark.parametrize("int8", [False, True], ids=["LIM", "LIM C8"])
def test_fourteen_rows(int8: bool) -> None:
    """The most rows Ascend takes, and a hot buffer that their top-k nearly fills, over a whole life."""
    stable, capacity = 33024, 28672
    chosen = [
        torch.randperm(stable, generator=generator(row))[:TOPK]
        if row % 3
        else torch.arange(row * 100, row * 100 + TOPK)
        for row in range(14)
    ]
    request = Request(chosen, stable, capacity, int8=int8)
    request.check_first(request.run(-2))
    before = request.pool[1].clone()
    out = request.run(-1)
    assert int(out["misses"]) == 0
    request.check_steady(before, out)
    shifted = Request([(positions + 7) % stable for positions in chosen], stable, capacity, int8=int8)
    shifted.pool = request.pool
    before = shifted.pool[1].clone()
    out = shifted.run(-1)
    assert int(out["misses"]) > 0
    shifted.check_steady(before, out)


@pytest.mark.parametrize("int8", [False, True], ids=["LIM", "LIM C8"])
@pytest.mark.parametrize("stable, capacity", [(131200 - 128, 2048), (131200, 32640), ((1 << 21) - 256, 4096)])
def test_the_longest_contexts(stable: int, capacity: int, int8: bool) -> None:
    """Up to 2^21 source positions in 2^14 blocks: first decode, then a step in which most is missing."""
    width = (1 << 14) if stable > 1 << 20 else 0
    first = Request(disjoint(1, stable, 3), stable, capacity, int8=int8, width=width)
    first.check_first(first.run(-2))
    far = torch.arange(stable - TOPK, stable)
    second = Request([far], stable, capacity, int8=int8, width=width, seed=1)
    second.pool = first.pool
    before = second.pool[1].clone()
    out = second.run(-1)
    assert int(out["misses"]) > TOPK // 2
    second.check_steady(before, out)


@pytest.mark.parametrize("path", [(-3, -1, -1), (-3, -2, -1), (-2, -1, -1)])
def test_lives_at_real_sizes(path: tuple[int, ...]) -> None:
    """From the identity row of a short context into the steady state, and through a first decode."""
    stable, capacity, pool = 8192, 6144, None
    for step, state in enumerate(path):
        request = Request(disjoint(2, stable, step), stable, capacity, seed=step)
        request.pool = request.pool if pool is None else pool
        before, out = request.pool[1].clone(), request.run(state)
        if state == -3:
            assert torch.equal(request.pool[1], torch.arange(request.pool.shape[1]).int())
            assert out["row_misses"].eq(0).all() and out["misses"].eq(0).all()
            assert torch.equal(out["slots"], out["ids"])
            for row, positions in enumerate(request.chosen):  # keys behind L have low scores here
                assert torch.equal(out["ids"][row, 0].long().sort().values, positions.sort().values)
        elif state == -2:
            request.check_first(out)
        else:
            before[capacity:] = torch.where(
                before[capacity:] == torch.arange(capacity, len(before)), NO_SLOT, before[capacity:]
            )
            request.check_steady(before, out)
        pool = request.pool


@pytest.mark.parametrize("misses", [0, 1, 2047, 2048, 2049, 4095, 4096, 4097, 32640])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_copies_and_attention_with_any_number_of_misses(rows: int, misses: int) -> None:
    """Hot contents are bit exact where a miss went and untouched elsewhere; rows attend to their slots and the tail."""
    heads, latent, rope, capacity, tail, context = 5, 16, 8, 32640, 37, 1 << 16
    rng = generator(misses + rows)
    hbm_table, hbm_blocks = random_tables([capacity + BLOCK], BLOCK, rng)
    dram_table, dram_blocks = random_tables([context], BLOCK, rng)
    slots = torch.randperm(capacity, generator=rng)
    sources = torch.randperm(context, generator=rng)[:misses]
    hot = [torch.randn(hbm_blocks, BLOCK, 1, dims, generator=rng) for dims in (latent, rope)]
    host = [torch.randn(dram_blocks, BLOCK, dims, generator=rng) for dims in (latent, rope)]
    expected = [cache.clone().flatten(0, 2) for cache in hot]
    at = hbm_table[0, slots[:misses] // BLOCK].long() * BLOCK + slots[:misses] % BLOCK
    source_at = dram_table[0, sources // BLOCK].long() * BLOCK + sources % BLOCK
    for cache, pool in zip(expected, host, strict=True):
        cache[at] = pool.flatten(0, 1)[source_at]
    picked = torch.stack([slots[torch.randperm(capacity, generator=rng)[:TOPK]] for _ in range(rows)])
    picked[:, : min(misses, 700)] = slots[: min(misses, 700)]
    lists = torch.full((2, 1, MISSES), POISON, dtype=torch.int32)
    lists[0, 0, :misses], lists[1, 0, :misses] = sources, slots[:misses]
    query, query_rope = torch.randn(rows, heads, latent, generator=rng), torch.randn(rows, heads, rope, generator=rng)
    out, copied = torch.full_like(query, float("nan")), torch.zeros(1, dtype=torch.int64)
    visible = capacity + tail
    fused_scatter_copy_sparse_flash_attention(
        *(query_rope, query, i32([rows]), i32([visible]), i32([capacity])),
        *(picked.int().unsqueeze(1), torch.zeros(rows, 1, TOPK, dtype=torch.int32), i32([0] * rows)),
        *(lists[0], lists[1], i32([misses]), hbm_table, dram_table, hot[1], hot[0], host[1], host[0], 0.2, out, copied),
    )
    assert int(copied) == misses * (latent + rope) * 4
    assert all(torch.equal(cache.flatten(0, 2), wanted) for cache, wanted in zip(hot, expected, strict=True))
    for row in range(rows):
        chosen = torch.cat([picked[row].unique(), torch.arange(capacity, visible - (rows - 1 - row))])
        where = hbm_table[0, chosen // BLOCK].long() * BLOCK + chosen % BLOCK
        ckv, k_rope = (cache[where].double() for cache in expected)
        scores = (query[row].double() @ ckv.T + query_rope[row].double() @ k_rope.T) * 0.2
        torch.testing.assert_close(out[row].double(), torch.softmax(scores, -1) @ ckv, atol=5e-5, rtol=5e-5)
