"""The indexer cache over int8 keys against the definition, as written again in tests.oracle_int8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine import ops
from engine.indexer_cache import IndexerCache
from engine.model.attention import IndexerQuery
from tests.oracle_int8 import index_scores, quantise

BLOCK, HEADS, DIMS, TOPK = 8, 16, 32, 20


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", ops.BACKENDS)
def test_the_quantiser_is_the_one_of_the_oracle(backend: ops.Backend) -> None:
    x = random(200, 3, DIMS) * torch.logspace(-2, 3, 200)[:, None, None]
    with ops.backend(backend):
        levels, scale = ops.hadamard_quantise(x)
    expected_levels, expected_scale = quantise(x)
    torch.testing.assert_close(scale.float(), expected_scale, rtol=2.0**-10, atol=0)  # one float16 step
    assert int((levels.float() - expected_levels).abs().max()) <= 1
    assert float((levels.float() != expected_levels).float().mean()) < 0.01  # at borders of rounding only


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


def test_without_scales_keys_stay_as_they_are() -> None:
    cache = IndexerCache(torch.zeros(2, BLOCK, 1, DIMS))
    keys = random(3, DIMS)
    cache.write(torch.tensor([9, 0, 4]), keys)
    assert torch.equal(cache.keys.view(-1, DIMS)[[9, 0, 4]], keys)
    assert cache.tensors == (cache.keys,)
