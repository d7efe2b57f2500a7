from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.ops import (
    BACKENDS,
    ascend_tail,
    backend,
    lightning_indexer,
    quant_lightning_indexer,
    select_with_tail,
)
from tests.ops.lim_case import BLOCK, TOPK, lim_case, quantised, run, spans
from tests.ops.paged_case import i32

TAIL_ARGUMENTS = (
    *("index_weights", "query", "index_key_cache", "index_block_table", "actual_seq_lengths_query"),
    *("actual_seq_lengths_key", "offload_seq_lengths_key", "num_cache_tokens", "request_state"),
    *("topk_src_ids", "topk_dst_slots"),
)


def with_tail(case: dict[str, Tensor], *, scores: bool) -> tuple[Tensor, Tensor]:
    quant = case["query"].dtype == torch.int8
    scales = (case["query_dequant_scale"], case["index_key_dequant_scale"]) if quant else (None, None)
    given = [case[name] for name in TAIL_ARGUMENTS]
    return select_with_tail(*given, case["topk_scores"] if scores else None, *scales)


def plain(case: dict[str, Tensor]) -> Tensor:
    lengths = (case["index_block_table"], case["actual_seq_lengths_query"], case["actual_seq_lengths_key"])
    keys = case["index_key_cache"]
    if case["query"].dtype != torch.int8:
        return lightning_indexer(case["query"], case["index_weights"], keys, *lengths, TOPK)
    query = case["query"], case["index_weights"], case["query_dequant_scale"]
    return quant_lightning_indexer(*query, keys, case["index_key_dequant_scale"], *lengths, TOPK)


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 9), st.sampled_from([-2, -1, -3])), min_size=1, max_size=3
    ),
    quant=st.booleans(),
    scores=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_exactly_the_top_k_of_all_visible_positions(
    shapes: list[tuple[int, int, int]], quant: bool, scores: bool, seed: int
) -> None:
    """LIM's top-k and the tail hold the model's top-k, and this picks it: the plain indexer's, ties included."""
    requests = [(q, 44 + q + spare, 44, 24, state) for q, spare, state in shapes]
    case = lim_case(requests, seed=seed)
    case = quantised(case, seed) if quant else case
    case["topk_scores"] = torch.full(case["topk_src_ids"].shape, float("nan"))
    case["cache_slots_pool"][:] = torch.arange(case["cache_slots_pool"].shape[1])
    results = []
    for name in BACKENDS:
        with backend(name):
            after = run(case)
            ids, slots = with_tail(after, scores=scores)
            assert torch.equal(ids[:, 0], plain(case))
            results.append((ids, slots))
    assert torch.equal(results[0][1], results[1][1])
    ids, slots = results[0]
    for i, span in enumerate(spans(case)):
        capacity, stable = int(case["num_cache_tokens"][i]), int(case["offload_seq_lengths_key"][i])
        slot_of = after["cache_slots_pool"][int(case["req_pool_entries"][i])]
        for row in span:
            for p, slot in zip(ids[row, 0].tolist(), slots[row, 0].tolist(), strict=True):
                if p == -1:
                    assert slot == -1
                elif int(case["request_state"][i]) == -3 or p < stable:
                    assert slot == slot_of[p]
                else:
                    assert slot == capacity + p - stable


def test_real_scores_are_the_same_bits_in_both_selections() -> None:
    """Real-valued scores and int8 ones of full range: sets equal those of the plain indexer, scores given or not."""
    for quant in (False, True):
        case = lim_case([(3, 120, 112, 64, -2)], seed=4, heads=17)
        if quant:
            case = quantised(case, 4)
        else:
            case["query"] = torch.randn(case["query"].shape)
            case["index_key_cache"] = torch.randn(case["index_key_cache"].shape)
            case["index_weights"] = torch.randn(case["index_weights"].shape)
        case["topk_scores"] = torch.full(case["topk_src_ids"].shape, float("nan"))
        after = run(case)
        for scores in (True, False):
            assert torch.equal(with_tail(after, scores=scores)[0][:, 0], plain(case))


def test_refused_rows_stay_refused(each_backend: str) -> None:
    case = lim_case([(1, 50, 44, 20, 0)], seed=1)
    case["topk_scores"] = torch.zeros(1, 1, TOPK)
    ids, slots = with_tail(run(case), scores=True)
    assert ids.eq(-1).all() and slots.eq(-1).all()


def test_errors_name_the_argument(each_backend: str) -> None:
    case = run({**lim_case([(1, 50, 44, 20, -2)], seed=1), "topk_scores": torch.zeros(1, 1, TOPK)})

    def refused(match: str, **changes: Tensor) -> None:
        with pytest.raises(ValueError, match=match):
            with_tail({**case, **changes}, scores=True)

    refused("topk_scores is torch.float64", topk_scores=torch.zeros(1, 1, TOPK, dtype=torch.float64))
    refused(r"topk_src_ids of row 0 .*legal: -1 to 43", topk_src_ids=torch.full((1, 1, TOPK), 44, dtype=torch.int32))
    refused("block", index_block_table=torch.full((1, 32), 999, dtype=torch.int32))
    refused("actual_seq_lengths_query", actual_seq_lengths_query=i32([2]))
    quant = quantised(case, 1)
    with pytest.raises(ValueError, match="query_dequant_scale or index_key_dequant_scale is None"):
        select_with_tail(
            *(quant[name] for name in ("index_weights", "query", "index_key_cache", "index_block_table")),
            *(quant[name] for name in ("actual_seq_lengths_query", "actual_seq_lengths_key")),
            *(quant[name] for name in ("offload_seq_lengths_key", "num_cache_tokens", "request_state")),
            *(quant["topk_src_ids"], quant["topk_dst_slots"]),
        )


@pytest.mark.parametrize("quant", [False, True], ids=["float", "int8"])
def test_the_ascend_route_picks_the_same(quant: bool) -> None:
    """What is put together from torch's operators equals the C++ operator, on tails of up to two blocks."""
    for seed in range(20):
        requests = [(1 + seed % 3, 44 + 3 + seed % 6, 44, 24, state) for state in (-2, -3, -2)]
        case = lim_case([*requests, (1, 50, 44, 20, 0)], seed=seed)  # the last is refused
        case = quantised(case, seed) if quant else case
        case["topk_scores"] = torch.full(case["topk_src_ids"].shape, float("nan"))
        after = run(case)
        assert int((after["actual_seq_lengths_key"] - after["offload_seq_lengths_key"]).max()) <= 2 * BLOCK
        expected = with_tail(after, scores=False)
        scales = (after["query_dequant_scale"], after["index_key_dequant_scale"]) if quant else (None, None)
        given = [after[name] for name in TAIL_ARGUMENTS]
        for got, wanted in zip(ascend_tail.select_with_tail(*given, None, *scales), expected, strict=True):
            assert torch.equal(got, wanted)
