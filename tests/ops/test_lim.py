from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.ops import (
    BACKENDS,
    NO_SLOT,
    backend,
    fused_lightning_indexer_manage,
    fused_quant_lightning_indexer_manage,
    lightning_indexer,
    quant_lightning_indexer,
)
from tests.ops.lim_case import BLOCK, POISON, TOPK, dense_scores, lim_case, quantised, run, spans
from tests.ops.paged_case import i32


def selections(case: dict[str, Tensor], i: int) -> list[list[int]]:
    """Top-k of each row of request i over [0, L), from dense float64 scores."""
    stable = int(case["offload_seq_lengths_key"][i])
    scores = dense_scores(case)
    return [
        torch.sort(scores[row][:stable], descending=True, stable=True).indices[: case["topk_src_ids"].shape[2]].tolist()
        for row in spans(case)[i]
    ]


def residents(case: dict[str, Tensor], i: int) -> dict[int, int]:
    row = case["cache_slots_pool"][int(case["req_pool_entries"][i])].tolist()
    return {position: slot for position, slot in enumerate(row) if slot >= 0}


def check_offloaded(before: dict[str, Tensor], after: dict[str, Tensor], i: int, *, first: bool) -> None:
    """Everything the contract says about request i in state -2 (`first`) or -1."""
    capacity, chosen = int(before["num_cache_tokens"][i]), selections(before, i)
    union = {p for ids in chosen for p in ids}
    old, new = {} if first else residents(before, i), residents(after, i)
    if not first and len(old) == before["cache_slots_pool"].shape[1]:
        old = {p: p for p in range(capacity)}  # the identity row of a request not offloaded before
    assert sorted(new.values()) == list(range(capacity)) and union <= new.keys()
    count = int(after["miss_counts"][i])
    misses = after["miss_src_ids"][i, :count].tolist()
    assert after["miss_dst_slots"][i, :count].tolist() == [new[p] for p in misses]
    assert after["miss_src_ids"][i, count:].eq(POISON).all() and after["miss_dst_slots"][i, count:].eq(POISON).all()
    if first:
        rest = [p for p in range(int(before["offload_seq_lengths_key"][i])) if p not in union]
        assert misses == (sorted(union) + rest)[:capacity] and [new[p] for p in misses] == list(range(capacity))
    else:
        assert misses == sorted(union - old.keys())
        assert {p: s for p, s in old.items() if p in union} == {p: s for p, s in new.items() if p in union & old.keys()}
        assert len(old.keys() - new.keys()) == count  # every victim made room for one miss
    for row, ids in zip(spans(before)[i], chosen, strict=True):
        mine = sorted(ids) if first else sorted(set(ids) - old.keys()) + sorted(set(ids) & old.keys())
        assert after["topk_src_ids"][row, 0].tolist() == mine
        assert after["topk_dst_slots"][row, 0].tolist() == [new[p] for p in mine]
        assert after["topk_miss_counts"][row] == (len(ids) if first else len(set(ids) - old.keys()))


def untouched_rows(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    named = before["req_pool_entries"].tolist()
    others = [row for row in range(before["cache_slots_pool"].shape[0]) if row not in named]
    return torch.equal(before["cache_slots_pool"][others], after["cache_slots_pool"][others])


def with_pool(case: dict[str, Tensor], pool: Tensor) -> dict[str, Tensor]:
    return {**case, "cache_slots_pool": pool.clone()}


@settings(max_examples=20, deadline=None)
@given(
    rows=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8]),
    seed=st.integers(0, 1 << 16),
)
def test_bijection_over_a_life_first_decode_then_steady(rows: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    """Growing requests with small hot buffers: exact sets, one slot per resident, equal results of both back ends."""
    pool = None
    for step in range(4):
        stable = [40 + 4 * step, 60 + 8 * step]
        shapes = [
            (q, n + q + seed % BLOCK, n, q * TOPK + 4 * (seed % 3), -2 if step == 0 else -1)
            for q, n in zip(rows, stable, strict=True)
        ]
        case = lim_case(shapes, dtype=torch.float32 if dtype == torch.int8 else dtype, seed=seed + step)
        case = quantised(case, seed + step) if dtype == torch.int8 else case
        case = case if pool is None else with_pool(case, pool)
        results = []
        for name in BACKENDS:
            with backend(name):
                results.append(run(case))
        for name, tensor in results[0].items():
            assert torch.equal(tensor, results[1][name]), name
        for i in range(2):
            check_offloaded(case, results[0], i, first=step == 0)
        assert untouched_rows(case, results[0])
        pool = results[0]["cache_slots_pool"]


@pytest.mark.parametrize("keys", [1, TOPK, 33])
def test_not_offloaded_int8_equals_the_plain_int8_indexer(each_backend: str, keys: int) -> None:
    case = quantised(lim_case([(3, keys + 2, 0, 0, -3)], seed=keys), keys)
    after = run(case)
    plain = quant_lightning_indexer(
        *(case["query"], case["index_weights"], case["query_dequant_scale"]),
        *(case["index_key_cache"], case["index_key_dequant_scale"], case["index_block_table"]),
        *(case["actual_seq_lengths_query"], case["actual_seq_lengths_key"]),
        TOPK,
    )
    assert torch.equal(after["topk_src_ids"][:, 0], plain) and torch.equal(after["topk_dst_slots"][:, 0], plain)


@pytest.mark.parametrize("keys", [1, TOPK - 1, TOPK, TOPK + 1, BLOCK, 33])
@pytest.mark.parametrize("q", [1, 14])
def test_not_offloaded_equals_the_plain_indexer(each_backend: str, keys: int, q: int) -> None:
    case = lim_case([(q, keys + q - 1, 0, 0, -3)], seed=keys)
    after = run(case)
    plain = lightning_indexer(
        *(case["query"], case["index_weights"], case["index_key_cache"], case["index_block_table"]),
        *(case["actual_seq_lengths_query"], case["actual_seq_lengths_key"]),
        TOPK,
    )
    assert torch.equal(after["topk_src_ids"][:, 0], plain) and torch.equal(after["topk_dst_slots"][:, 0], plain)
    assert after["topk_miss_counts"].eq(0).all() and after["miss_counts"].eq(0).all()
    assert residents(after, 0) == {p: p for p in range(case["cache_slots_pool"].shape[1])}
    assert untouched_rows(case, after)


def test_scores_come_with_the_selection_if_asked_for(each_backend: str) -> None:
    case = lim_case([(2, 50, 44, 20, -2), (1, 9, 0, 0, -3), (1, 3, 0, 0, -2)], seed=7)
    case["topk_scores"] = torch.full((4, 1, TOPK), float("nan"))
    after = run(case)
    dense = dense_scores(case)
    for row in range(3):
        chosen = after["topk_src_ids"][row, 0].tolist()
        assert after["topk_scores"][row, 0].tolist() == [float(dense[row][p]) for p in chosen]
    assert after["topk_scores"][3].eq(-torch.inf).all()  # a refused request
    plain = run({name: value for name, value in case.items() if name != "topk_scores"})
    assert all(torch.equal(after[name], value) for name, value in plain.items())


def test_more_rows_than_share_a_tile_agree_on_the_victims(each_backend: str) -> None:
    """20 rows of one request are scored in two parts; victims go by the sum over both."""
    case = lim_case([(20, 250, 228, 168, -1)], width_blocks=64, seed=3)
    case["cache_slots_pool"][5] = torch.arange(256)
    check_victims(case)


@pytest.mark.parametrize("path", [(-3, -1, -1), (-3, -2, -1), (-2, -1, -1)])
def test_legal_lives(each_backend: str, path: tuple[int, ...]) -> None:
    pool = None
    for step, state in enumerate(path):
        case = lim_case([(2, 50 + step, 44, 20, state), (1, 9, 0, 0, -3)], seed=step)
        case = case if pool is None else with_pool(case, pool)
        after = run(case)
        if state != -3:
            check_offloaded(case, after, 0, first=state == -2)
        pool = after["cache_slots_pool"]


def test_a_full_hot_buffer_never_misses(each_backend: str) -> None:
    """C == L, as when L <= Q * top-k: all searchable positions are resident."""
    case = lim_case([(14, 40, 24, 24, -2)], seed=2)
    first = run(case)
    check_offloaded(case, first, 0, first=True)
    steady = with_pool(lim_case([(14, 40, 24, 24, -1)], seed=3), first["cache_slots_pool"])
    assert run(steady)["miss_counts"].tolist() == [0]


def check_victims(case: dict[str, Tensor]) -> None:
    """Of request 0, the only one, in state -1."""
    after = run(case)
    stable, capacity = int(case["offload_seq_lengths_key"][0]), int(case["num_cache_tokens"][0])
    before = {p: slot for p, slot in residents(case, 0).items() if slot < capacity}
    union = {p for ids in selections(case, 0) for p in ids}
    total = torch.stack([scores[:stable] for scores in dense_scores(case)]).sum(0)
    candidates = sorted(before.keys() - union, key=lambda p: (float(total[p]), -p))
    victims = before.keys() - residents(after, 0).keys()
    assert victims and victims == set(candidates[: len(victims)])


def test_victims_have_the_lowest_summed_score(each_backend: str) -> None:
    case = lim_case([(2, 50, 44, 20, -1)], seed=9)
    case["cache_slots_pool"][5, 24:44] = torch.arange(20, dtype=torch.int32)
    check_victims(case)


ILLEGAL = {
    "unknown state": (1, 50, 44, 20, 0),
    "L below top-k": (1, 50, 4, 4, -2),
    "C above L": (1, 50, 44, 48, -2),
    "L above keys": (1, 40, 44, 20, -2),
    "L not a multiple of the block": (1, 50, 42, 20, -2),
    "C not a multiple of the block": (1, 50, 44, 18, -2),
    "C below the rows' top-k": (3, 50, 44, 20, -2),
    "C is not L where L fits": (3, 50, 24, 20, -2),
    "L reaches into the last rows": (3, 46, 44, 24, -2),
    "more rows than keys": (5, 4, 0, 0, -3),
    "nothing resident": (1, 50, 44, 20, -1),
}


@pytest.mark.parametrize("name", list(ILLEGAL))
def test_an_illegal_request_keeps_its_row_and_its_neighbour_works(each_backend: str, name: str) -> None:
    case = lim_case([ILLEGAL[name], (1, 50, 44, 20, -2)], seed=1)
    case["cache_slots_pool"][5] = torch.arange(case["cache_slots_pool"].shape[1] - 1, -1, -1)
    if name == "nothing resident":
        case["cache_slots_pool"][5] = NO_SLOT
    after = run(case)
    mine = spans(case)[0]
    assert torch.equal(after["cache_slots_pool"][5], case["cache_slots_pool"][5])
    for output in ("topk_src_ids", "topk_dst_slots"):
        assert after[output][mine.start : mine.stop].eq(-1).all()
    assert after["topk_miss_counts"][mine.start : mine.stop].eq(0).all() and after["miss_counts"][0] == 0
    check_offloaded(case, after, 1, first=True)


@pytest.mark.parametrize("position, slot", [(44, 19), (3, 3), (3, 20)], ids=["beyond L", "twice", "beyond C"])
def test_a_steady_request_whose_row_is_no_bijection_is_refused(each_backend: str, position: int, slot: int) -> None:
    case = lim_case([(1, 60, 44, 20, -1)], seed=1)
    case["cache_slots_pool"][5, 10:29] = torch.arange(19, dtype=torch.int32)  # one short of C
    case["cache_slots_pool"][5, position] = slot
    after = run(case)
    assert after["topk_src_ids"].eq(-1).all() and after["miss_counts"].eq(0).all()
    assert torch.equal(after["cache_slots_pool"], case["cache_slots_pool"])


def test_threads_do_not_change_the_result() -> None:
    case = lim_case([(2, 50, 44, 20, -2), (3, 90, 80, 28, -2), (1, 9, 0, 0, -3)], seed=4)
    one = run(case)
    torch.set_num_threads(4)
    assert all(torch.equal(tensor, one[name]) for name, tensor in run(case).items())


def test_errors_name_the_argument(each_backend: str) -> None:
    def refused(match: str, **changes: Tensor) -> None:
        with pytest.raises(ValueError, match=match):
            case = {**lim_case([(1, 50, 44, 20, -2), (2, 50, 44, 20, -2)]), **changes}
            fused_lightning_indexer_manage(*case.values())

    with pytest.raises(ValueError, match="dequant scales must be fp16"):
        fused_quant_lightning_indexer_manage(*lim_case([(1, 50, 44, 20, -2)]).values())
    refused("dequant scales must be fp32", query_dequant_scale=torch.ones(3, 3, dtype=torch.float16))
    refused("miss outputs must be", miss_src_ids=torch.zeros(2, 8, dtype=torch.int64))
    refused("miss outputs must be", miss_dst_slots=torch.zeros(2, 8, dtype=torch.int32))
    refused("must be contiguous", topk_src_ids=torch.zeros(3, 1, 16, dtype=torch.int32)[:, :, ::2])
    refused(r"index_weights is torch.bfloat16", index_weights=torch.zeros(3, 3, dtype=torch.bfloat16))
    refused(r"cache_slots_pool has shape \[6, 64\]", cache_slots_pool=torch.zeros(6, 64, dtype=torch.int32))
    refused("req_pool_entries", req_pool_entries=i32([1, 1]))
    refused("req_pool_entries", req_pool_entries=i32([1, 6]))
    refused("actual_seq_lengths_query", actual_seq_lengths_query=i32([0, 3]))
    refused("actual_seq_lengths_query", actual_seq_lengths_query=i32([1, 2]))
    refused("block_table", index_block_table=torch.full((2, 32), 999, dtype=torch.int32))
