"""The int8 indexer: its quantiser, and its top-k against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.indexer_cache import IndexerCache
from engine.int8_indexer import hadamard_quantise, quant_lightning_indexer
from engine.model.attention import IndexerQuery
from tests.oracle_int8 import hadamard, index_scores

BLOCK, HEADS, DIMS, TOPK = 8, 16, 32, 20


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dims", [1, 2, 32, 128, 1024])
def test_levels_times_scale_are_the_rotated_row(dims: int) -> None:
    x = random(50, 3, dims) * torch.logspace(-2, 3, 50)[:, None, None]
    levels, scale = hadamard_quantise(x)
    assert levels.dtype == torch.int8 and scale.dtype == torch.float16
    assert levels.shape == x.shape and scale.shape == x.shape[:-1]
    rotated = x.double() @ hadamard(dims).double() / dims**0.5
    error = (levels.double() * scale.double()[..., None] - rotated).abs()
    assert bool((error <= 0.501 * scale.double()[..., None] + 127 * 2.0**-11 * scale.double()[..., None]).all())
    assert int(levels.abs().max()) <= 127


def test_rotation_keeps_dot_products() -> None:
    a, b = random(64, 128, seed=1), random(64, 128, seed=2)
    (qa, sa), (qb, sb) = hadamard_quantise(a), hadamard_quantise(b)
    products = (qa.float() * qb.float()).sum(-1) * sa.float() * sb.float()
    torch.testing.assert_close(products, (a * b).sum(-1), atol=0.5, rtol=0)  # they are of order 11


def test_the_scale_is_rounded_before_it_divides() -> None:
    x = torch.zeros(1, 4)
    x[0, 0] = 2 * 100.0  # rotated: 100 everywhere
    levels, scale = hadamard_quantise(x)
    assert scale.item() == torch.tensor(100 / 127).half().item() != 100 / 127
    assert levels.tolist() == [[127] * 4]


def test_rows_without_a_scale_are_zeros() -> None:
    levels, scale = hadamard_quantise(torch.tensor([[0.0, 0.0], [1e-7, 0.0], [1e9, 0.0], [float("nan"), 1.0]]))
    assert levels.tolist() == [[0, 0], [0, 0], [127, 127], [0, 0]]
    assert scale[:2].tolist() == [0, 0] and scale[2] == torch.finfo(torch.float16).max and scale[3].isnan()


@pytest.mark.parametrize("dims", [3, 48, 2048])
def test_a_row_that_cannot_be_rotated_is_refused(dims: int) -> None:
    with pytest.raises(ValueError, match=f"rows of {dims} elements .* power of two, at most 1024"):
        hadamard_quantise(torch.zeros(2, dims))


def paged(rows: list[Tensor], cache: IndexerCache, table: Tensor) -> None:
    for i, keys in enumerate(rows):
        at = torch.arange(len(keys))
        cache.write(table[i].long()[at // BLOCK] * BLOCK + at % BLOCK, keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selection_is_the_top_k_of_the_defined_scores(dtype: torch.dtype) -> None:
    lengths, rows = [5, TOPK, TOPK + 1, 150], [1, 2, 3, 100]
    keys = [random(length, DIMS, seed=length).to(dtype) for length in lengths]
    blocks = 64
    cache = IndexerCache(
        torch.full((blocks, BLOCK, 1, DIMS), 99, dtype=torch.int8),
        torch.full((blocks, BLOCK, 1), float("nan"), dtype=torch.float16),
    )
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))[:40].reshape(4, -1).repeat(1, 2).int()
    table = torch.cat((table[:, :10], torch.zeros(4, 9, dtype=torch.int32)), 1)
    table[3] = torch.tensor([b for b in range(blocks) if b not in table[:3].flatten().tolist()][:19])
    paged(keys, cache, table)
    ends = torch.tensor(rows).cumsum(0).int()
    q = random(int(ends[-1]), HEADS, DIMS, seed=7).to(dtype)
    raw = random(int(ends[-1]), HEADS, seed=8).to(dtype).float()
    query = IndexerQuery(q, torch.empty(0), raw * (HEADS * DIMS) ** -0.5)
    chosen = cache.select(query, table, ends, torch.tensor(lengths).int(), TOPK)
    row = 0
    for length, count, k in zip(lengths, rows, keys, strict=True):
        scores = index_scores(q[row : row + count], k, raw[row : row + count]).double()
        for offset in range(count):
            visible = length - (count - 1 - offset)
            if visible <= 0:
                assert chosen[row].eq(-1).all()
            else:
                best = scores[offset, :visible].topk(min(TOPK, visible))
                ids = chosen[row][chosen[row] >= 0].tolist()
                assert len(ids) == len(set(ids)) == min(TOPK, visible)
                assert max(ids) < visible
                picked = scores[offset, ids]
                assert torch.equal(picked, picked.sort(descending=True).values)
                torch.testing.assert_close(picked, best.values, atol=1e-6, rtol=1e-5)
            row += 1


def test_ties_go_to_the_lowest_position() -> None:
    levels = torch.ones(1, 1, 2, dtype=torch.int8)
    cache = torch.ones(1, 4, 1, 2, dtype=torch.int8)
    ones = torch.ones(1, 1, dtype=torch.float16)
    ids = quant_lightning_indexer(
        levels,
        torch.ones(1, 1),
        ones,
        cache,
        torch.ones(1, 4, 1, dtype=torch.float16),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([4], dtype=torch.int32),
        3,
    )
    assert ids.tolist() == [[0, 1, 2]]


def test_without_scales_keys_stay_as_they_are() -> None:
    cache = IndexerCache(torch.zeros(2, BLOCK, 1, DIMS))
    keys = random(3, DIMS)
    cache.write(torch.tensor([9, 0, 4]), keys)
    assert torch.equal(cache.keys.view(-1, DIMS)[[9, 0, 4]], keys)
    assert cache.tensors == (cache.keys,)
