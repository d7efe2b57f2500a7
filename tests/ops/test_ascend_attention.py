"""Attention of the ascend back end over operators that are as strict as Ascend's, against our own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops import (
    ascend_attention,
    ascend_copy_sfa,
    fused_scatter_copy_sparse_flash_attention,
    sparse_flash_attention,
)
from engine.ops.ascend_copy_sfa import copy_then_attend
from engine.ops.copy_sfa_call import CopyAttentionCall
from tests.ops import ascend_emulation
from tests.ops.ascend_case import BLOCK, LATENT, ROPE, TOPK, DecodeCase, with_clones
from tests.ops.paged_case import generator, i32, random_tables

ascend_fused = ascend_copy_sfa.fused_scatter_copy_sparse_flash_attention
NAME = "npu_fused_scatter_copy_sparse_flash_attention"


@pytest.fixture(autouse=True)
def operators() -> None:
    ascend_emulation.install()
    ascend_emulation.calls.clear()


def close(given: Any, wanted: Any) -> None:
    torch.testing.assert_close(given, wanted, atol=2e-2, rtol=2e-2)


def step(heads: int = 8) -> dict[str, Any]:
    return next(DecodeCase.random(heads).steps(1))


def same_bits(given: Tensor, wanted: Tensor) -> bool:
    return torch.equal(given.view(torch.int16), wanted.view(torch.int16))  # NaNs too


@pytest.mark.parametrize("heads, rows", [(3, 1), (8, 1), (8, 3)])
def test_a_decode_loop_gets_exact_attention_and_exact_copies(heads: int, rows: int) -> None:
    """Misses in lists only, padded rows, few heads, no tail: what ours accepts, through one that accepts none of it.

    Several rows of a request attend to new slots that they share: none may count on another's copy.
    """
    missed = []
    for arguments in DecodeCase.random(heads, rows).steps(3):
        ours = with_clones(arguments)
        ours_copied, copied = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        fused_scatter_copy_sparse_flash_attention(**ours, copied_bytes=ours_copied)
        ascend_fused(**arguments, copied_bytes=copied)
        close(arguments["attention_out"], ours["attention_out"])
        assert all(same_bits(arguments[cache], ours[cache]) for cache in ("hbm_k_rope", "hbm_kv_cache"))
        assert int(copied) == int(ours_copied)
        assert not last_call_filled()
        missed.append(arguments["miss_counts"].tolist())
    assert missed[0][1] == 90 and missed[1][1] == rows and missed[0][0] >= TOPK - 1 > missed[1][0] > 0


def last_call_filled() -> bool:
    (_, given) = ascend_emulation.calls[-1]
    return bool((given["miss_counts"] >= given["num_cache_tokens"]).any())


def test_rows_are_misses_then_hits_then_padding() -> None:
    case = DecodeCase.random(8)
    for arguments in case.steps(2):
        ascend_fused(**arguments)
    (_, given) = ascend_emulation.calls[-1]
    for i, count in enumerate(arguments["miss_counts"].tolist()):
        assert int(given["topk_miss_counts"][i]) == count
        pairs = torch.stack([given["topk_src_ids"][i, 0], given["topk_dst_slots"][i, 0]], 1).tolist()
        listed = torch.stack([arguments["miss_src_ids"][i], arguments["miss_dst_slots"][i]], 1)[:count].tolist()
        before = torch.stack([arguments["topk_src_ids"][i, 0], arguments["topk_dst_slots"][i, 0]], 1).tolist()
        padding = [pair for pair in before if pair[1] < 0]
        hits = [pair for pair in before if pair[1] >= 0 and pair not in listed]
        assert sorted(pairs[:count]) == sorted(listed)
        assert pairs[count:] == hits + padding


def test_no_value_is_read_on_the_host() -> None:
    """Else every layer would wait for the device; tensors without data would raise."""
    arguments = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in step().items()}
    ascend_fused(**arguments)


def test_arguments_stand_in_the_contracts_order() -> None:
    arguments = step()
    ascend_fused(**arguments)
    ((name, given),) = ascend_emulation.calls
    assert name == NAME and CopyAttentionCall._fields == (*given, "copied_bytes")
    for cache in ("hbm_k_rope", "hbm_kv_cache", "dram_k_rope", "dram_kv_cache"):
        assert given[cache].data_ptr() == arguments[cache].data_ptr()
    assert given["scale_value"] == arguments["scale_value"]
    unchanged = ("query", "query_rope", "actual_seq_lengths_query", "actual_seq_lengths_kv", "num_cache_tokens")
    for same in (*unchanged, "miss_counts", "hbm_block_table", "dram_block_table"):
        assert torch.equal(given[same][:2], arguments[same])
    for lists in ("miss_src_ids", "miss_dst_slots"):
        count = int(given["miss_counts"][0])
        assert given[lists].shape == (3, 32768) and torch.equal(given[lists][0, :count], arguments[lists][0, :count])


def test_a_first_fill_copies_the_lists() -> None:
    """A dense request (C = 0) puts the whole batch on that path."""
    arguments = step()
    stride = int(arguments["num_cache_tokens"][0])
    arguments["num_cache_tokens"] = i32([stride, 0])
    arguments["actual_seq_lengths_kv"] = i32([stride, 90])
    ours = with_clones(arguments)
    fused_scatter_copy_sparse_flash_attention(**ours)
    ascend_fused(**arguments)
    close(arguments["attention_out"], ours["attention_out"])
    assert last_call_filled() and not bool(arguments["attention_out"].isnan().any())


def test_a_tail_is_seen_row_by_row() -> None:
    """C below what rows see, as after the fused indexer: row r attends to its slots and to [C, visible(r))."""
    case = DecodeCase.random(8, rows=2)
    arguments = next(case.steps(1))
    arguments["num_cache_tokens"] = i32([case.capacity] * 2)
    arguments["actual_seq_lengths_kv"] = i32([case.capacity + 2] * 2)
    beyond = arguments["topk_dst_slots"] >= case.capacity
    arguments["topk_dst_slots"][beyond] = -1  # the tail is not named
    ours = with_clones(arguments)
    fused_scatter_copy_sparse_flash_attention(**ours)
    ascend_fused(**arguments)
    close(arguments["attention_out"], ours["attention_out"])
    assert ascend_emulation.calls[-1][1]["actual_seq_lengths_kv"].tolist()[:4] == [
        case.capacity + n for n in (1, 2, 1, 2)
    ]


def test_a_miss_that_no_row_attends_to_is_copied_all_the_same() -> None:
    """The fused indexer's misses that newer positions have displaced: residency counts on them in the next step."""
    arguments = step()
    displaced = arguments["topk_dst_slots"][0, 0, 7].item()
    arguments["topk_dst_slots"][0, 0, 7] = arguments["topk_src_ids"][0, 0, 7] = -1
    assert displaced in arguments["miss_dst_slots"][0].tolist()
    ours = with_clones(arguments)
    fused_scatter_copy_sparse_flash_attention(**ours)
    ascend_fused(**arguments)
    assert last_call_filled()
    close(arguments["attention_out"], ours["attention_out"])
    assert all(same_bits(arguments[cache], ours[cache]) for cache in ("hbm_k_rope", "hbm_kv_cache"))


def test_leading_misses_of_the_fused_indexer_stay_in_front() -> None:
    arguments = step()
    ascend_fused(**arguments)
    (_, first) = ascend_emulation.calls[-1]
    again = {**arguments, **{name: first[name][:2] for name in ("topk_dst_slots", "topk_src_ids", "topk_miss_counts")}}
    ascend_fused(**again)
    (_, second) = ascend_emulation.calls[-1]
    for name in ("topk_dst_slots", "topk_src_ids", "topk_miss_counts"):
        assert torch.equal(first[name], second[name])


def replaced(arguments: dict[str, Any], name: str, value: Tensor) -> dict[str, Any]:
    assert name in arguments
    return {**arguments, name: value}


@pytest.mark.parametrize("call", [ascend_fused, copy_then_attend])
def test_illegal_copy_attention_names_the_argument(call: Any) -> None:
    arguments = step()

    def refused(match: str, name: str, value: Tensor) -> None:
        with pytest.raises(ValueError, match=match):
            call(**replaced(arguments, name, value))

    refused("query is torch.float32; legal: torch.bfloat16, torch.float16", "query", arguments["query"].float())
    refused("hbm_k_rope is torch.float16", "hbm_k_rope", arguments["hbm_k_rope"].half())
    refused(
        r"dram_kv_cache has shape \[1, 64, 512\]", "dram_kv_cache", arguments["dram_kv_cache"][:1, :64].contiguous()
    )
    refused("miss_counts is torch.int64; legal: torch.int32", "miss_counts", arguments["miss_counts"].long())
    refused(
        "query_rope has strides", "query_rope", arguments["query_rope"].transpose(0, 1).contiguous().transpose(0, 1)
    )
    refused(
        "hbm_kv_cache is on meta; legal: the device of query, cpu", "hbm_kv_cache", arguments["hbm_kv_cache"].to("meta")
    )
    assert not ascend_emulation.calls


def test_copy_attention_beyond_ascends_limits_is_refused() -> None:
    arguments = step()
    narrow = arguments["topk_dst_slots"][..., :64].contiguous()
    with pytest.raises(ValueError, match="topk is 64; legal on Ascend: 2048"):
        ascend_fused(**{**arguments, "topk_dst_slots": narrow, "topk_src_ids": narrow})
    wide = torch.zeros(2, 40000, dtype=torch.int32)
    with pytest.raises(ValueError, match="miss_capacity is 40000; legal on Ascend: 32768"):
        ascend_fused(**{**arguments, "miss_src_ids": wide, "miss_dst_slots": wide})
    many = {name: arguments[name].repeat(20, 1, 1) for name in ("query", "query_rope", "attention_out")}
    many |= {name: arguments[name].repeat(20, 1, 1) for name in ("topk_dst_slots", "topk_src_ids")}
    with pytest.raises(ValueError, match="T = 40 rows for B = 2 requests; legal on Ascend: B <= T <= 16B"):
        ascend_fused(**{**arguments, **many, "topk_miss_counts": torch.zeros(40, dtype=torch.int32)})


def test_the_unfused_route_refuses_a_tail() -> None:
    arguments = replaced(step(), "num_cache_tokens", i32([4096, 64]))
    with pytest.raises(ValueError, match=r"actual_seq_lengths_kv\[1\] is 2304; .* num_cache_tokens\[1\], 64"):
        copy_then_attend(**arguments)


@pytest.mark.parametrize("heads", [5, 16])
def test_prefill_attention_equals_ours(heads: int) -> None:
    rng, lengths, rows = generator(3), [300, 130], [3, 2]
    table, blocks = random_tables(lengths, BLOCK, rng)
    total, ends = sum(rows), torch.tensor(rows).cumsum(0).int()
    ids = torch.full((total, TOPK), -1, dtype=torch.int32)
    for row in range(total):
        visible = lengths[0] - 2 + row if row < 3 else lengths[1] - 1 + row - 3
        chosen = torch.randperm(visible, generator=rng)[:100].int()
        ids[row, 5:105] = chosen[: len(ids[row, 5:105])]  # padding in front as well
    arguments = (
        torch.randn(total, heads, LATENT, generator=rng).half(),
        torch.randn(total, heads, ROPE, generator=rng).half(),
        torch.randn(blocks, BLOCK, 1, LATENT, generator=rng).half(),
        torch.randn(blocks, BLOCK, 1, ROPE, generator=rng).half(),
        *(table.clamp(max=blocks - 1), ends, ids, 0.05),
    )
    torch.testing.assert_close(
        ascend_attention.sparse_flash_attention(*arguments), sparse_flash_attention(*arguments), atol=3e-3, rtol=3e-3
    )
