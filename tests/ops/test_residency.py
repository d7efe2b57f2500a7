from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops import BACKENDS, Residency, ResidencyState, backend, lru_residency
from tests.ops.paged_case import generator, i32


def i64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def call(
    ids: list[list[int]],
    stable: list[int],
    state: ResidencyState,
    rows: list[int],
    generations: list[int] | None = None,
    out: Residency | None = None,
) -> Residency:
    return lru_residency(i32(ids), i32(stable), i64(generations or [7] * len(rows)), i32(rows), state, out)


def poisoned(rows: int, topk: int) -> Residency:
    out = Residency.empty(rows, topk)
    for tensor in out:
        tensor.fill_(12345)
    return out


@settings(max_examples=40, deadline=None)
@given(
    capacity=st.integers(6, 14),
    steps=st.lists(st.tuples(st.integers(-1, 25), st.integers(0, 1)), min_size=1, max_size=12),
    seed=st.integers(0, 1 << 16),
)
def test_conservation_and_equal_decisions_of_both_back_ends(
    capacity: int, steps: list[tuple[int, int]], seed: int
) -> None:
    """After every step each wanted sealed position has one slot, misses are the rest, slots are conserved."""
    topk, rng = 6, generator(seed)
    states = {name: ResidencyState.empty(3, capacity) for name in BACKENDS}
    for stable, generation in steps:
        ids = torch.randint(-1, 20, (2, topk), generator=rng).tolist()
        results = {}
        before = [tensor[1].clone() for tensor in states["cpu"]]
        held = {row: set(states["cpu"].slot_to_token[row].tolist()) - {-1} for row in (2, 0)}
        same = {row: states["cpu"].last_generation[row] == generation for row in (2, 0)}
        for name in BACKENDS:
            with backend(name):
                results[name] = call(
                    ids, [stable, stable + 3], states[name], [2, 0], [generation, generation], poisoned(2, topk)
                )
        for got, wanted in zip(results["cpu"], results["reference"], strict=True):
            assert got.tolist() == wanted.tolist()
        for got, wanted in zip(states["cpu"], states["reference"], strict=True):
            assert got.tolist() == wanted.tolist()
        assert all(torch.equal(old, tensor[1]) for old, tensor in zip(before, states["cpu"], strict=True))

        result, state = results["cpu"], states["cpu"]
        for b, (row, limit) in enumerate([(2, max(stable, 0)), (0, max(stable + 3, 0))]):
            tokens = state.slot_to_token[row].tolist()
            assert state.last_used[row].max() <= state.clock[row]
            assert all(tokens.count(token) == 1 for token in tokens if token >= 0)
            assert all(token < limit for token in tokens)
            sealed = list(dict.fromkeys(p for p in ids[b] if 0 <= p < limit))
            resident = held[row] if same[row] else set()
            misses = [p for p in sealed if p not in resident]
            count = int(result.miss_counts[b])
            assert result.miss_ids[b].tolist() == misses + [-1] * (topk - len(misses)) and count == len(misses)
            assert [tokens[s] for s in result.miss_slots[b, :count].tolist()] == misses
            assert result.miss_slots[b, count:].eq(-1).all()
            for p, slot in zip(ids[b], result.slots[b].tolist(), strict=True):
                if p < 0:
                    assert slot == -1
                elif p < limit:
                    assert tokens[slot] == p
                else:
                    assert slot == capacity + p - limit


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    spare=st.integers(0, 6),
    stables=st.lists(st.integers(0, 25), min_size=1, max_size=6),
    seed=st.integers(0, 1 << 16),
)
def test_no_row_of_a_request_loses_what_another_row_selected(
    spans: list[int], spare: int, stables: list[int], seed: int
) -> None:
    """Several query rows per request: the union of their misses, each once; both back ends decide alike."""
    topk, rng, requests = 5, generator(seed), len(spans)
    capacity = topk * max(*spans, 1) + spare
    ends = i32(torch.tensor(spans).cumsum(0).tolist())
    states = {name: ResidencyState.empty(requests, capacity) for name in BACKENDS}
    for stable in stables:
        ids = torch.randint(-1, 28, (sum(spans), topk), generator=rng, dtype=torch.int32)
        held = [set(row.tolist()) for row in states["cpu"].slot_to_token]
        results = {}
        for name in BACKENDS:
            with backend(name):
                results[name] = lru_residency(
                    ids,
                    i32([stable] * requests),
                    i64([3] * requests),
                    i32(list(range(requests))),
                    states[name],
                    query_ends=ends,
                )
        for got, wanted in zip(
            (*results["cpu"], *states["cpu"]), (*results["reference"], *states["reference"]), strict=True
        ):
            assert got.tolist() == wanted.tolist()
        for request, (first, rows) in enumerate(zip([0, *ends.tolist()], spans, strict=False)):
            named = ids[first : first + rows].flatten().tolist()
            slots = results["cpu"].slots[first : first + rows].flatten().tolist()
            tokens, count = states["cpu"].slot_to_token[request].tolist(), int(results["cpu"].miss_counts[request])
            sealed = list(dict.fromkeys(p for p in named if 0 <= p < stable))
            assert results["cpu"].miss_ids[request, :count].tolist() == [p for p in sealed if p not in held[request]]
            assert all(tokens[slot] == p for p, slot in zip(named, slots, strict=True) if 0 <= p < stable)
            assert all(slot == capacity + p - stable for p, slot in zip(named, slots, strict=True) if p >= stable)
            assert states["cpu"].last_used[request].max() <= states["cpu"].clock[request]


def test_rows_of_one_request_share_the_hot_buffer(each_backend: str) -> None:
    """Two rows of one request that name the same position fetch it once; too small a buffer is refused."""
    state = ResidencyState.empty(1, 6)
    first = lru_residency(i32([[4, 9, 2], [9, 11, 4]]), i32([10]), i64([1]), i32([0]), state, query_ends=i32([2]))
    assert first.miss_ids[0].tolist() == [4, 9, 2, -1, -1, -1]
    assert first.miss_counts.tolist() == [3]
    assert first.slots[1, 0] == first.slots[0, 1] and first.slots[1, 1] == 6 + 1
    assert first.slots[1, 2] == first.slots[0, 0]
    with pytest.raises(ValueError, match=r"slot_to_token holds 6 slots; legal: .* each row of a request, 9"):
        lru_residency(i32([[1, 2, 3]] * 3), i32([10]), i64([1]), i32([0]), state, query_ends=i32([3]))
    with pytest.raises(ValueError, match=r"query_ends ends at 1; legal: the number of query rows, 2"):
        lru_residency(i32([[1, 2, 3]] * 2), i32([10]), i64([1]), i32([0]), state, query_ends=i32([1]))


def test_the_least_recently_used_slot_is_the_victim(each_backend: str) -> None:
    state = ResidencyState.empty(1, 4)
    call([[10, 11, 12, 13]], [100], state, [0])
    call([[10, 11, -1, -1]], [100], state, [0])
    result = call([[20, -1, -1, -1]], [100], state, [0])
    assert result.miss_ids[0].tolist() == [20, -1, -1, -1]
    assert set(state.slot_to_token[0].tolist()) == {20, 10, 11, 13}  # 12 was the oldest
    result = call([[30, 10, -1, -1]], [100], state, [0])
    assert result.miss_ids[0].tolist() == [30, -1, -1, -1]
    assert set(state.slot_to_token[0].tolist()) == {20, 10, 11, 30}
    result = call([[40, -1, -1, -1]], [100], state, [0])
    assert set(state.slot_to_token[0].tolist()) == {20, 10, 40, 30}  # 10 was used since, 11 was not


def test_a_second_identical_call_hits_everything_and_changes_no_contents(each_backend: str) -> None:
    state = ResidencyState.empty(1, 8)
    first = call([[5, 3, 9, 3]], [50], state, [0])
    tokens = state.slot_to_token.clone()
    second = call([[5, 3, 9, 3]], [50], state, [0])
    assert first.miss_counts.tolist() == [3] and second.miss_counts.tolist() == [0]
    assert first.slots.tolist() == second.slots.tolist() and torch.equal(tokens, state.slot_to_token)


def test_the_clock_starts_over_before_it_runs_out(each_backend: str) -> None:
    state = ResidencyState.empty(1, 4)
    call([[1, 2, 3, 4]], [50], state, [0])
    most = torch.iinfo(torch.int32).max
    state.last_used.add_(most - 9)
    state.clock.add_(most - 9)
    for step in range(20):
        result = call([[1, 2, 10 + step]], [50], state, [0])
        assert result.miss_counts.tolist() == [1] and state.clock[0] > 0
        assert {1, 2, 10 + step, 9 + step if step else 4} == set(state.slot_to_token[0].tolist())


@pytest.mark.parametrize("idle", [0, 3, 200, 5000])
def test_the_oldest_slots_go_first_however_long_ago_they_were_used(idle: int) -> None:
    """A hot buffer that has had hits only for `idle` calls: both back ends take the same victims, the oldest ones."""
    results, rng = [], generator(idle)
    fills = [torch.randperm(200, generator=rng)[:12].tolist() for _ in range(6)]
    for name in BACKENDS:
        state = ResidencyState.empty(1, 40)
        with backend(name):
            for step, ids in enumerate(fills):
                call([ids], [500], state, [0])
                state.clock.add_(idle * step)
            age = state.last_used[0].clone()
            result = call([[300 + i for i in range(12)]], [500], state, [0])
        taken = result.miss_slots[0].tolist()
        assert taken == sorted(sorted(range(40), key=lambda slot: (int(age[slot]), slot))[:12])
        results.append(taken)
    assert results[0] == results[1]


def test_another_generation_never_hits(each_backend: str) -> None:
    state = ResidencyState.empty(1, 4)
    call([[1, 2, 3, 4]], [50], state, [0], [1])
    assert call([[1, 2, 3, 4]], [50], state, [0], [2]).miss_counts.tolist() == [4]
    assert call([[1, 2, 3, 4]], [50], state, [0], [2 + (1 << 40)]).miss_counts.tolist() == [4]
    assert state.last_generation.tolist() == [2 + (1 << 40)]


def test_rows_at_or_after_the_stable_prefix_are_never_counted_as_hits(each_backend: str) -> None:
    state = ResidencyState.empty(1, 4)
    call([[1, 2, 8, 9]], [10], state, [0])
    result = call([[1, 8, 9, 30]], [9], state, [0])  # rolled back: 9 is no longer sealed
    assert result.miss_counts.tolist() == [0]
    assert result.slots[0, 2:].tolist() == [4 + 0, 4 + 21]
    assert 9 not in state.slot_to_token[0].tolist()


def test_skipped_rows_are_written_in_full(each_backend: str) -> None:
    state = ResidencyState.empty(2, 4)
    before = [tensor.clone() for tensor in state]
    result = call([[1, 2, 3, 4]], [50], state, [-1], out=poisoned(1, 4))
    assert all(result[i].eq(-1).all() for i in range(3)) and result.miss_counts.tolist() == [0]
    assert all(torch.equal(old, new) for old, new in zip(before, state, strict=True))


def test_errors_name_the_argument(each_backend: str) -> None:
    state = ResidencyState.empty(2, 4)
    with pytest.raises(ValueError, match=r"slot_to_token holds 4 slots; legal: at least topk_ids.shape\[1\] .*, 5"):
        call([[1, 2, 3, 4, 5]], [50], state, [0])
    with pytest.raises(ValueError, match="row_index"):
        call([[1], [2]], [50, 50], state, [1, 1])
    with pytest.raises(ValueError, match="row_index"):
        call([[1]], [50], state, [2])
    with pytest.raises(ValueError, match=r"generation is torch.int32; legal: torch.int64"):
        lru_residency(i32([[1]]), i32([5]), i32([1]), i32([0]), state)
    call([[1]], [50], state, [0])
    state.last_used[0] = 1000
    with pytest.raises(ValueError, match=r"last_used\[0\] holds times later than the row's clock"):
        call([[9]], [50], state, [0])
