from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops import BACKENDS, available_isas, backend, lightning_indexer, native, select_isa
from tests.ops.paged_case import IndexerCase, i32


def assert_best(case: IndexerCase, ids: torch.Tensor, topk: int, slack: float) -> None:
    """`ids` are legal, distinct, ordered by score and as good as the float64 best, to within `slack`."""
    for row, scores in enumerate(case.dense_scores()):
        count = min(topk, scores.shape[0])
        got = ids[row, :count].tolist()
        assert ids[row, count:].eq(-1).all()
        assert len(set(got)) == count and all(0 <= p < scores.shape[0] for p in got)
        best = torch.sort(scores, descending=True, stable=True).values[:count]
        torch.testing.assert_close(scores[got], best, atol=slack, rtol=0)


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 14), st.integers(14, 90)), min_size=1, max_size=3),
    heads=st.sampled_from([1, 3, 8, 17]),
    dims=st.sampled_from([5, 16, 40]),
    block_size=st.sampled_from([1, 7, 16]),
    topk=st.sampled_from([1, 8, 16, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1 << 16),
)
def test_ties_go_to_the_lowest_position_on_both_back_ends(
    shapes: list[tuple[int, int]],
    heads: int,
    dims: int,
    block_size: int,
    topk: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    case = IndexerCase.random(
        shapes, heads=heads, dims=dims, block_size=block_size, dtype=dtype, seed=seed, integers=True
    )
    expected = [torch.sort(s, descending=True, stable=True).indices[:topk].tolist() for s in case.dense_scores()]
    for name in BACKENDS:
        with backend(name):
            ids = lightning_indexer(*case.args(), topk)
        assert [[p for p in row if p >= 0] for row in ids.tolist()] == expected
        assert ids.dtype == torch.int32


@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65, 127, 300])
def test_real_scores_select_the_best(each_backend: str, length: int) -> None:
    case = IndexerCase.random([(3, length)], heads=16, dims=32, block_size=32, dtype=torch.float32, seed=length)
    assert_best(case, lightning_indexer(*case.args(), 64), 64, slack=1e-4)


def test_rows_without_a_visible_key_are_padding(each_backend: str) -> None:
    case = IndexerCase.random([(4, 2), (1, 0)], heads=2, dims=8, block_size=4, dtype=torch.float32, seed=1)
    ids = lightning_indexer(*case.args(), 3)
    assert ids[:2].eq(-1).all() and ids[4].eq(-1).all()
    assert ids[2].tolist() == [0, -1, -1] and sorted(ids[3].tolist()) == [-1, 0, 1]


def test_nan_scores_rank_last_and_zeros_of_both_signs_tie(each_backend: str) -> None:
    keys = torch.tensor([1.0, float("nan"), 3.0, -5.0, 0.0, 2.0]).view(1, 6, 1, 1)
    query = torch.ones(1, 1, 1)
    one = i32([[0]])
    ids = lightning_indexer(query, torch.ones(1, 1), keys, one, i32([1]), i32([6]), 6)
    assert ids.tolist() == [[2, 5, 0, 3, 4, 1]]
    ids = lightning_indexer(query, -torch.ones(1, 1), keys, one, i32([1]), i32([6]), 6)
    assert ids.tolist() == [[3, 4, 0, 5, 2, 1]]


def test_prefill_and_decode_select_alike() -> None:
    """The same row gives the same ids alone, in a batch of rows, on one thread and split over key segments."""
    rows, length = 40, 9000
    case = IndexerCase.random([(rows, length)], heads=4, dims=24, block_size=64, dtype=torch.bfloat16, seed=3)
    for topk in (128, length):
        torch.set_num_threads(1)
        whole = lightning_indexer(*case.args(), topk)
        for row in (0, 17, rows - 1):
            visible = i32([length - (rows - 1 - row)])
            one = (case.query[row : row + 1], case.weights[row : row + 1], case.key_cache, case.block_table)
            for threads in (1, 4):
                torch.set_num_threads(threads)
                assert lightning_indexer(*one, i32([1]), visible, topk).tolist() == [whole[row].tolist()]


@pytest.mark.parametrize("order", ["falling", "rising", "equal"])
def test_sorted_and_equal_scores_over_a_long_context(order: str) -> None:
    length, topk = 5000, 100
    ramp = {"falling": torch.arange(length, 0, -1), "rising": torch.arange(length), "equal": torch.ones(length)}[order]
    keys = ramp.float().view(1, length, 1, 1)
    ids = lightning_indexer(torch.ones(1, 1, 1), torch.ones(1, 1), keys, i32([[0]]), i32([1]), i32([length]), topk)
    expected = range(length - 1, length - 1 - topk, -1) if order == "rising" else range(topk)
    assert ids[0].tolist() == list(expected)


def test_every_instruction_set_agrees() -> None:
    case = IndexerCase.random([(5, 200)], heads=9, dims=20, block_size=8, dtype=torch.bfloat16, seed=5, integers=True)
    results = []
    try:
        for isa in available_isas():
            select_isa(isa)
            results.append(lightning_indexer(*case.args(), 50).tolist())
    finally:
        select_isa(None)
    assert all(result == results[0] for result in results)
    with pytest.raises(ValueError, match=r"legal: .*portable"):
        select_isa("mmx")


def test_errors_name_the_argument(each_backend: str) -> None:
    case = IndexerCase.random([(2, 20)], heads=2, dims=8, block_size=4, dtype=torch.float32, seed=1)
    query, weights, keys, table, ends, lens = case.args()

    def refused(match: str, *args: object) -> None:
        with pytest.raises(ValueError, match=match):
            lightning_indexer(*args)

    refused("query is torch.float64; legal: torch.float32", query.double(), weights, keys, table, ends, lens, 4)
    refused(r"key_cache is torch.bfloat16", query, weights, keys.bfloat16(), table, ends, lens, 4)
    refused(r"weights has shape \[2, 1\]; legal: \[2, 2\]", query, weights[:, :1], keys, table, ends, lens, 4)
    refused("must be contiguous", query.transpose(0, 1), weights, keys, table, ends, lens, 4)
    refused("block_table is torch.int64", query, weights, keys, table.long(), ends, lens, 4)
    refused("topk is 0", query, weights, keys, table, ends, lens, 0)
    refused("query_ends ends at 1; legal: the number of query rows, 2", query, weights, keys, table, i32([1]), lens, 4)
    refused("key_lens|block_table", query, weights, keys, table, ends, i32([21]), 4)
    refused("block_table", query, weights, keys, table + 1000, ends, lens, 4)


def test_library_path_is_told_when_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "LIBRARY_PATH", tmp_path / "libsluice_ops.so")
    native._library.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="is not built; run `make setup`"):
            available_isas()
    finally:
        native._library.cache_clear()


def test_memory_does_not_grow_with_rows_times_keys() -> None:
    """512 rows over 64K keys: all scores at once would be 128 MiB, over heads 1 GiB (A16). Asked in a fresh process."""
    code = """
import resource, torch
from engine.ops import lightning_indexer, set_num_threads
set_num_threads(1)
def select(rows, keys):
    table = torch.arange(keys // 128, dtype=torch.int32)[None]
    query, weights = torch.ones(rows, 8, 4), torch.ones(rows, 8)
    cache, ends = torch.ones(keys // 128, 128, 1, 4), torch.tensor([rows], dtype=torch.int32)
    lightning_indexer(query, weights, cache, table, ends, torch.tensor([keys], dtype=torch.int32), 64)
select(1, 65536)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
select(512, 65536)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 16 << 10, "KiB"
