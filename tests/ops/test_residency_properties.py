"""What every residency keeps, by name: LIM and the unfused LRU, in C++ and as the reference, over random lives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops import BACKENDS, Backend, ResidencyState, backend, lru_residency
from tests.ops.lim_case import BLOCK, TOPK, lim_case, quantised, run
from tests.ops.paged_case import i32

ROWS, CAPACITY = 2, 6 * BLOCK


@dataclass
class Step:
    """One call as any residency sees it: the map before and after (position -> slot), its rows, its misses."""

    before: dict[int, int]
    after: dict[int, int]
    chosen: list[list[int]]
    misses: list[int]
    miss_slots: list[int]
    slots: list[list[int]] = field(default_factory=list)

    @property
    def union(self) -> set[int]:
        return {position for row in self.chosen for position in row}


def lim_life(name: Backend, seed: int, lengths: list[int], int8: bool) -> Iterator[Step]:
    """LIM from first decode on, the searchable prefix growing to `lengths`."""
    pool, before = None, {}
    for step, stable in enumerate(lengths):
        case = lim_case([(ROWS, stable + ROWS, stable, CAPACITY, -1 if step else -2)], seed=seed + step)
        case = quantised(case, seed + step) if int8 else case
        case["cache_slots_pool"] = case["cache_slots_pool"] if pool is None else pool
        with backend(name):
            done = run(case)
        pool = done["cache_slots_pool"]
        after = {p: slot for p, slot in enumerate(pool[int(case["req_pool_entries"][0])].tolist()) if slot >= 0}
        count = int(done["miss_counts"])
        lists = (done[key][0, :count].tolist() for key in ("miss_src_ids", "miss_dst_slots"))
        rows = (done[key][:, 0].tolist() for key in ("topk_src_ids", "topk_dst_slots"))
        chosen, slots = rows
        yield Step(before, after, chosen, *lists, slots)
        before = after


def lru_life(name: Backend, seed: int, lengths: list[int]) -> Iterator[Step]:
    """The unfused residency on selections as LIM made them."""
    state, before = ResidencyState.empty(1, CAPACITY), {}
    for selected in lim_life("cpu", seed, lengths, int8=False):
        with backend(name):
            found = lru_residency(
                i32(selected.chosen), i32([1 << 20]), torch.ones(1).long(), i32([0]), state, query_ends=i32([ROWS])
            )
        count = int(found.miss_counts)
        after = {p: slot for slot, p in enumerate(state.slot_to_token[0].tolist()) if p >= 0}
        lists = found.miss_ids[0, :count].tolist(), found.miss_slots[0, :count].tolist()
        yield Step(before, after, selected.chosen, *lists, found.slots.tolist())
        before = after


LIVES = {
    **{f"LIM {name}": lambda seed, lengths, name=name: lim_life(name, seed, lengths, int8=False) for name in BACKENDS},
    **{
        f"LIM C8 {name}": lambda seed, lengths, name=name: lim_life(name, seed, lengths, int8=True) for name in BACKENDS
    },
    **{f"LRU {name}": lambda seed, lengths, name=name: lru_life(name, seed, lengths) for name in BACKENDS},
}
some_life = {
    "seed": st.integers(0, 1 << 16),
    "lengths": st.lists(st.integers(7, 20), min_size=2, max_size=5).map(
        lambda n: [BLOCK * value for value in sorted(n)]
    ),
}
quick = settings(max_examples=12, deadline=None)
every_life = pytest.mark.parametrize("life", list(LIVES))


@every_life
@quick
@given(**some_life)
def test_bijection_of_slots(life: str, seed: int, lengths: list[int]) -> None:
    """Residents and slots are one to one; every selected position is resident in the slot its row names."""
    for step in LIVES[life](seed, lengths):
        assert len(set(step.after.values())) == len(step.after) <= CAPACITY
        assert all(0 <= slot < CAPACITY for slot in step.after.values())
        for chosen, slots in zip(step.chosen, step.slots, strict=True):
            assert [step.after[position] for position in chosen] == slots


@every_life
@quick
@given(**some_life)
def test_no_victim_in_any_rows_top_k(life: str, seed: int, lengths: list[int]) -> None:
    """What leaves the buffer was selected by no row, and what stays keeps its slot."""
    for number, step in enumerate(LIVES[life](seed, lengths)):
        if number == 0:
            continue  # LIM's first decode starts anew
        assert not (step.before.keys() - step.after.keys()) & step.union
        assert all(step.after[p] == slot for p, slot in step.before.items() if p in step.after)


@every_life
@quick
@given(**some_life)
def test_conservation(life: str, seed: int, lengths: list[int]) -> None:
    """Slots are neither lost nor gained: a full buffer gives up one resident per miss, which gets its slot."""
    for number, step in enumerate(LIVES[life](seed, lengths)):
        if number == 0:
            continue
        assert sorted(step.misses) == sorted(step.union - step.before.keys())
        assert step.miss_slots == [step.after[position] for position in step.misses]
        gone = step.before.keys() - step.after.keys()
        free = CAPACITY - len(step.before)
        assert len(step.after) == min(CAPACITY, len(step.before) + len(step.misses))
        assert len(gone) == max(0, len(step.misses) - free)
        assert {step.before[position] for position in gone} <= set(step.miss_slots)


@every_life
@quick
@given(**some_life)
def test_idempotence(life: str, seed: int, lengths: list[int]) -> None:
    """The same selection again misses nothing and moves nothing."""
    repeated = [length for length in lengths for _ in range(2)]
    if life.startswith("LRU"):
        state = ResidencyState.empty(1, CAPACITY)
        for step in lim_life("cpu", seed, lengths, int8=False):
            arguments = i32(step.chosen), i32([1 << 20]), torch.ones(1).long(), i32([0]), state
            with backend("cpu" if life.endswith("cpu") else "reference"):
                lru_residency(*arguments, query_ends=i32([ROWS]))
                tokens = state.slot_to_token.clone()
                again = lru_residency(*arguments, query_ends=i32([ROWS]))
            assert again.miss_counts.tolist() == [0] and torch.equal(tokens, state.slot_to_token)
        return
    case = lim_case([(ROWS, repeated[-1] + ROWS, repeated[-1], CAPACITY, -2)], seed=seed)
    case = quantised(case, seed) if "C8" in life else case
    with backend("cpu" if life.endswith("cpu") else "reference"):
        first = run(case)
        case.update(cache_slots_pool=first["cache_slots_pool"], request_state=i32([-1]))
        again = run(case)
    assert again["miss_counts"].tolist() == [0] and again["topk_miss_counts"].eq(0).all()
    assert torch.equal(again["cache_slots_pool"], first["cache_slots_pool"])


def lru_state_of(residents: dict[int, int]) -> ResidencyState:
    """An LRU state that holds the same residents in the same slots."""
    state = ResidencyState.empty(1, CAPACITY)
    state.last_generation[0] = 1
    for position, slot in residents.items():
        state.slot_to_token[0, slot] = position
    return state


@quick
@given(int8=st.booleans(), **some_life)
def test_equal_hits_and_misses_of_all_back_ends(int8: bool, seed: int, lengths: list[int]) -> None:
    """Given the same residents and the same selection, LIM, the unfused LRU and both references miss the same."""
    lives = {name: list(lim_life(name, seed, lengths, int8)) for name in BACKENDS}
    for ours, reference in zip(lives["cpu"], lives["reference"], strict=True):
        assert ours == reference
    for step in lives["cpu"][1:]:
        found = {}
        for name in BACKENDS:
            with backend(name):
                arguments = i32(step.chosen), i32([1 << 20]), torch.ones(1).long(), i32([0]), lru_state_of(step.before)
                found[name] = lru_residency(*arguments, query_ends=i32([ROWS]))
            count = int(found[name].miss_counts)
            assert sorted(found[name].miss_ids[0, :count].tolist()) == step.misses
            for chosen, slots in zip(step.chosen, found[name].slots.tolist(), strict=True):
                hits = {p: slot for p, slot in zip(chosen, slots, strict=True) if p in step.before}
                assert hits == {p: step.before[p] for p in hits}


def test_lives_do_evict() -> None:
    """The properties above are not vacuous: hot buffers are full and positions come and go."""
    for life in LIVES.values():
        steps = list(life(3, [BLOCK * n for n in (8, 12, 16, 20)]))
        assert any(step.before.keys() - step.after.keys() for step in steps[1:])
        assert any(set(step.union) & step.before.keys() for step in steps[1:])
        assert len(steps[0].chosen[0]) == TOPK
