"""The ascend back end's indexers and residency over emulated operators, against ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops import ResidencyState, ascend, ascend_indexer, lightning_indexer
from tests.ops import ascend_emulation
from tests.ops.paged_case import IndexerCase, i32


@pytest.fixture(autouse=True)
def operators() -> None:
    ascend_emulation.install()
    ascend_emulation.calls.clear()


def indexer_case(dtype: torch.dtype = torch.bfloat16) -> IndexerCase:
    """Integers, so that every sum is exact and ties abound."""
    return IndexerCase.random(
        [(3, 2300), (1, 70)], heads=32, dims=128, block_size=128, dtype=dtype, seed=1, integers=True
    )


def test_the_plain_indexer_selects_what_ours_does() -> None:
    case = indexer_case()
    for topk in (2048, 5):
        assert torch.equal(ascend_indexer.lightning_indexer(*case.args(), topk), lightning_indexer(*case.args(), topk))


def test_the_int8_indexer_is_given_its_scales() -> None:
    """With scales of 1 it selects what the plain one does; a token's scale lifts it, a row's scale mutes the row."""
    case, wanted = indexer_case(torch.int8), lightning_indexer(*indexer_case().args(), 64)
    query_scale = torch.ones(case.query.shape[:2], dtype=torch.float16)
    key_scale = torch.ones(case.key_cache.shape[:3], dtype=torch.float16)

    def selected() -> Tensor:
        return ascend_indexer.quant_lightning_indexer(
            case.query, case.weights, query_scale, case.key_cache, key_scale, *case.args()[3:], 64
        )

    assert torch.equal(selected(), wanted)
    scores = case.dense_scores()[2]
    loser = next(p for p in range(100) if scores[p] > 0 and p not in wanted[2].tolist())
    key_scale[int(case.block_table[0, 0]), loser] = 1000.0
    assert selected()[2, 0] == loser
    query_scale[2] = 0
    assert selected()[2].tolist() == list(range(64))


@pytest.mark.parametrize(
    "position, change, match",
    [
        (0, lambda t: t.float(), "query is torch.float32; legal: torch.bfloat16, torch.float16"),
        (0, lambda t: t[:, :, :64].contiguous(), r"key_cache has shape .* legal: \[any, any, 1, 64\]"),
        (2, lambda t: t[:, :64].contiguous(), "block_size is 64; legal on Ascend: 128"),
        (2, lambda t: t.half(), "key_cache is torch.float16; legal: torch.bfloat16"),
        (3, lambda t: t.long(), "block_table is torch.int64; legal: torch.int32"),
        (3, lambda t: t.new_zeros(2, 16385), "max_blocks is 16385; legal on Ascend: 1 to 16384"),
        (5, lambda t: t[:1], r"key_lens has shape \[1\]; legal: \[2\]"),
        (1, lambda t: t.to("meta"), "weights is on meta; legal: the device of query, cpu"),
    ],
)
def test_illegal_indexer_calls_name_the_argument(position: int, change: Any, match: str) -> None:
    arguments = list(indexer_case().args())
    arguments[position] = change(arguments[position])
    with pytest.raises(ValueError, match=match):
        ascend_indexer.lightning_indexer(*arguments, 2048)


def manage_case(*, int8: bool) -> dict[str, Tensor]:
    """One first decode (-2) of 2,304 hot slots over 2,688 keys, two rows."""
    case = IndexerCase.random(
        [(2, 2700)],
        heads=32,
        dims=128,
        block_size=128,
        dtype=torch.int8 if int8 else torch.bfloat16,
        seed=2,
        integers=True,
    )
    scale = torch.float16 if int8 else torch.float32

    def out(*shape: int) -> Tensor:
        return torch.full(shape, 77, dtype=torch.int32)

    table = torch.zeros(1, 40, dtype=torch.int32)
    table[:, : case.block_table.shape[1]] = case.block_table
    return {
        "index_weights": case.weights.bfloat16(),
        "query_dequant_scale": torch.ones(2, 32, dtype=scale),
        "query": case.query,
        "index_key_dequant_scale": torch.ones(case.key_cache.shape[:3], dtype=scale),
        "index_key_cache": case.key_cache,
        "index_block_table": table,
        "actual_seq_lengths_query": case.query_ends,
        "actual_seq_lengths_key": case.key_lens,
        "offload_seq_lengths_key": i32([2560]),
        "num_cache_tokens": i32([2560]),
        "request_state": i32([-2]),
        "req_pool_entries": i32([1]),
        "cache_slots_pool": out(3, 40 * 128),
        "topk_src_ids": out(2, 1, 2048),
        "topk_dst_slots": out(2, 1, 2048),
        "topk_miss_counts": out(2),
        "miss_src_ids": out(1, 32768),
        "miss_dst_slots": out(1, 32768),
        "miss_counts": out(1),
    }


@pytest.mark.parametrize("int8", [False, True])
def test_the_fused_indexers_arguments_stand_in_the_contracts_order(int8: bool) -> None:
    case = manage_case(int8=int8)
    call = (
        ascend_indexer.fused_quant_lightning_indexer_manage if int8 else ascend_indexer.fused_lightning_indexer_manage
    )
    call(*case.values())
    ((name, given),) = ascend_emulation.calls
    assert name == f"npu_fused_{'quant_' if int8 else ''}lightning_indexer_manage"
    assert ascend_emulation.MANAGE == tuple(case) == tuple(given)
    assert all(given[argument].data_ptr() == case[argument].data_ptr() for argument in case)


def test_the_fused_indexer_writes_through() -> None:
    case = manage_case(int8=False)
    ascend_indexer.fused_lightning_indexer_manage(**case)
    assert case["miss_counts"].tolist() == [2560] and case["topk_miss_counts"].tolist() == [2048, 2048]
    assert sorted(case["cache_slots_pool"][1, :2560].tolist()) == list(range(2560))
    assert case["cache_slots_pool"][[0, 2]].unique().tolist() == [77]


@pytest.mark.parametrize("int8", [False, True])
def test_illegal_fused_indexer_calls_name_the_argument(int8: bool) -> None:
    case = manage_case(int8=int8)
    call = (
        ascend_indexer.fused_quant_lightning_indexer_manage if int8 else ascend_indexer.fused_lightning_indexer_manage
    )

    def refused(match: str, **changes: Tensor) -> None:
        with pytest.raises(ValueError, match=match):
            call(**{**case, **changes})

    right, wrong = (torch.float16, torch.float32) if int8 else (torch.float32, torch.float16)
    scale = "fp16" if int8 else "fp32"
    refused(f"dequant scales must be {scale}", query_dequant_scale=case["query_dequant_scale"].to(wrong))
    refused(f"dequant scales must be {scale}", index_key_dequant_scale=case["index_key_dequant_scale"].to(wrong))
    assert case["query_dequant_scale"].dtype == right
    refused("index_weights is torch.float16; legal: torch.bfloat16", index_weights=case["index_weights"].half())
    refused("query is torch.float32", query=case["query"].float())
    refused("request_state is torch.int64", request_state=case["request_state"].long())
    refused("cache_slots_pool has shape", cache_slots_pool=case["cache_slots_pool"][:, :128].contiguous())
    refused("must be contiguous", topk_src_ids=torch.zeros(2, 1, 4096, dtype=torch.int32)[..., ::2])
    narrow = torch.zeros(1, 2048, dtype=torch.int32)
    refused("miss_capacity is 2048; legal on Ascend: 32768", miss_src_ids=narrow, miss_dst_slots=narrow)
    refused("topk_scores is given; legal on Ascend: None", topk_scores=torch.zeros(2, 1, 2048))
    rows = {name: case[name].repeat_interleave(8, 0)[:15] for name in ("index_weights", "query_dequant_scale", "query")}
    rows |= {name: case[name].repeat_interleave(8, 0)[:15] for name in ("topk_src_ids", "topk_dst_slots")}
    refused(
        "T = 15 rows for B = 1 requests; legal on Ascend: B <= T <= 14B",
        **rows,
        topk_miss_counts=torch.zeros(15, dtype=torch.int32),
    )
    assert not ascend_emulation.calls


def test_residency_is_decided_on_the_host() -> None:
    ids, state = i32([[3, 1, -1], [9, 0, 4]]), ResidencyState.empty(2, 4)
    arguments = ids, i32([5, 5]), torch.tensor([7, 8]), i32([1, 0])
    outputs = [torch.empty(shape, dtype=torch.int32) for shape in ((2, 3), (2, 3), (2, 3), (2,), (2,))]
    ascend.lru_residency(*arguments, None, *state, *outputs)
    slots, miss_ids, miss_slots, misses, hits = outputs
    assert slots.tolist() == [[0, 1, -1], [8, 0, 1]] and misses.tolist() == [2, 2] and hits.tolist() == [0, 0]
    assert miss_ids.tolist() == [[3, 1, -1], [0, 4, -1]] and miss_slots.tolist() == [[0, 1, -1], [0, 1, -1]]
    with pytest.raises(ValueError, match="slot_to_token is on meta; legal: cpu, residency is decided on the host"):
        ascend.lru_residency(*arguments, None, *state._replace(slot_to_token=state.slot_to_token.to("meta")), *outputs)


def test_the_fused_operators_are_preferred_where_they_are() -> None:
    """And have the arguments of the operators' reference, whatever they say about aliases."""
    assert [ascend.enable() for _ in range(2)] == ["fused", "fused"]
