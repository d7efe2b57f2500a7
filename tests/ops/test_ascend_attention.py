"""Attention of the ascend back end over operators that are as strict as Ascend's, against our own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops import ascend_attention, fused_scatter_copy_sparse_flash_attention, sparse_flash_attention
from engine.ops.ascend_attention import CopyAttentionArguments, copy_then_attend
from tests.ops import ascend_emulation
from tests.ops.ascend_case import BLOCK, CAPACITY, LATENT, ROPE, TOPK, DecodeCase, with_clones
from tests.ops.paged_case import generator, i32, random_tables

ascend_copy_sfa = ascend_attention.fused_scatter_copy_sparse_flash_attention
NAME = "npu_fused_scatter_copy_sparse_flash_attention"


@pytest.fixture(autouse=True)
def operators() -> None:
    ascend_emulation.install()
    ascend_emulation.calls.clear()


def close(given: Any, wanted: Any) -> None:
    torch.testing.assert_close(given, wanted, atol=2e-2, rtol=2e-2)


def step(heads: int = 8) -> dict[str, Any]:
    return next(DecodeCase.random(heads).steps(1))


@pytest.mark.parametrize("heads", [3, 8])
def test_a_decode_loop_gets_exact_attention_and_exact_copies(heads: int) -> None:
    """Misses in lists only, padded rows, few heads: what our operator accepts, through one that accepts none of it."""
    missed = []
    for arguments in DecodeCase.random(heads).steps(3):
        ours = with_clones(arguments)
        ours_copied, copied = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        fused_scatter_copy_sparse_flash_attention(**ours, copied_bytes=ours_copied)
        ascend_copy_sfa(**arguments, copied_bytes=copied)
        close(arguments["attention_out"], ours["attention_out"])
        for cache in ("hbm_k_rope", "hbm_kv_cache"):
            assert torch.equal(arguments[cache].view(torch.int16), ours[cache].view(torch.int16))  # NaNs too
        assert int(copied) == int(ours_copied)
        missed.append(arguments["miss_counts"].tolist())
    assert missed[0] == [TOPK - 1, 90] and 0 < missed[1][0] < TOPK - 1 and missed[1][1] == 1


def test_rows_are_misses_then_hits_then_padding() -> None:
    case = DecodeCase.random(8)
    for arguments in case.steps(2):
        ascend_copy_sfa(**arguments)
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


def test_arguments_stand_in_the_contracts_order() -> None:
    arguments = step()
    ascend_copy_sfa(**arguments)
    ((name, given),) = ascend_emulation.calls
    assert name == NAME and CopyAttentionArguments._fields == (*given, "copied_bytes")
    for same in set(given) - {"topk_dst_slots", "topk_src_ids", "topk_miss_counts", "miss_src_ids", "miss_dst_slots"}:
        if same == "scale_value":
            assert given[same] == arguments[same]
        else:
            assert given[same].data_ptr() == arguments[same].data_ptr()
    for lists in ("miss_src_ids", "miss_dst_slots"):
        count = int(given["miss_counts"][0])
        assert given[lists].shape == (2, 32768) and torch.equal(given[lists][0, :count], arguments[lists][0, :count])


def test_a_first_fill_copies_the_lists() -> None:
    """A dense request (C = 0) puts the whole batch on that path."""
    arguments = step()
    arguments["num_cache_tokens"] = i32([CAPACITY + BLOCK, 0])
    arguments["actual_seq_lengths_kv"] = i32([CAPACITY + BLOCK, 90])
    ours = with_clones(arguments)
    fused_scatter_copy_sparse_flash_attention(**ours)
    ascend_copy_sfa(**arguments)
    close(arguments["attention_out"], ours["attention_out"])
    assert not bool(arguments["attention_out"].isnan().any())


def test_rows_of_one_request_each_copy_the_misses_they_share() -> None:
    """Two rows attend to the same new slots at the same time: neither may count on the other's copy."""
    arguments = step()
    rows, shared = 2, arguments["topk_dst_slots"][:1]
    arguments |= {
        "actual_seq_lengths_query": i32([rows]),
        "actual_seq_lengths_kv": arguments["actual_seq_lengths_kv"][:1],
        "num_cache_tokens": arguments["num_cache_tokens"][:1],
        "topk_dst_slots": torch.cat([shared, shared.flip(2)]),
        "topk_src_ids": torch.cat([arguments["topk_src_ids"][:1], arguments["topk_src_ids"][:1].flip(2)]),
    }
    for name in ("miss_src_ids", "miss_dst_slots", "miss_counts", "hbm_block_table", "dram_block_table"):
        arguments[name] = arguments[name][:1]
    arguments["query"][1], arguments["query_rope"][1] = arguments["query"][0], arguments["query_rope"][0]
    ascend_copy_sfa(**arguments)
    assert not bool(arguments["attention_out"].isnan().any())
    close(arguments["attention_out"][0], arguments["attention_out"][1])
    assert ascend_emulation.calls[-1][1]["topk_miss_counts"].tolist() == [TOPK - 1, TOPK - 1]


def test_leading_misses_of_the_fused_indexer_stay_in_front() -> None:
    arguments = step()
    ascend_copy_sfa(**arguments)
    (_, first) = ascend_emulation.calls[-1]
    again = {**arguments, **{name: first[name] for name in ("topk_dst_slots", "topk_src_ids", "topk_miss_counts")}}
    ascend_copy_sfa(**again)
    (_, second) = ascend_emulation.calls[-1]
    for name in ("topk_dst_slots", "topk_src_ids", "topk_miss_counts"):
        assert torch.equal(first[name], second[name])


def replaced(arguments: dict[str, Any], name: str, value: Tensor) -> dict[str, Any]:
    assert name in arguments
    return {**arguments, name: value}


@pytest.mark.parametrize("call", [ascend_copy_sfa, copy_then_attend])
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
        ascend_copy_sfa(**{**arguments, "topk_dst_slots": narrow, "topk_src_ids": narrow})
    wide = torch.zeros(2, 40000, dtype=torch.int32)
    with pytest.raises(ValueError, match="miss_capacity is 40000; legal on Ascend: 32768"):
        ascend_copy_sfa(**{**arguments, "miss_src_ids": wide, "miss_dst_slots": wide})
    many = {name: arguments[name].repeat(20, 1, 1) for name in ("query", "query_rope", "attention_out")}
    many |= {name: arguments[name].repeat(20, 1, 1) for name in ("topk_dst_slots", "topk_src_ids")}
    with pytest.raises(ValueError, match="T = 40 rows for B = 2 requests; legal on Ascend: B <= T <= 16B"):
        ascend_copy_sfa(**{**arguments, **many, "topk_miss_counts": torch.zeros(40, dtype=torch.int32)})


def test_the_unfused_route_refuses_a_tail() -> None:
    arguments = replaced(step(), "num_cache_tokens", i32([CAPACITY + BLOCK, 64]))
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
