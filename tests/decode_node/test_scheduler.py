"""The scheduler alone: from a reservation to its end, with quarantine, completion and leases."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decode_node.events import (
    Delivered,
    Ended,
    Failure,
    FailureKind,
    GeneratedToken,
    Released,
)
from decode_node.finish import FinishReason
from decode_node.scheduler import Phase
from tests.decode_node.scheduler_bench import EOS, LEASE, NOTHING, RANKS, WORD, Bench, failure_of


@pytest.mark.parametrize("order", ["token first", "pulls first"])
def test_runs_only_with_first_token_and_every_rank_pulled(order: str) -> None:
    bench = Bench()
    bench.submit("a")
    generation = bench.generation("a")
    steps: list[Callable[[], None]] = [
        lambda: bench.scheduler.prefilled("a", WORD, 0.0),
        lambda: bench.scheduler.pull_ended("a", generation, 0, None, 0.0),
        lambda: bench.scheduler.pull_ended("a", generation, 0, None, 0.0),  # a duplicate does not stand for rank 1
        lambda: bench.scheduler.pull_ended("a", generation, 1, None, 0.0),
    ]
    if order == "pulls first":
        steps = [*steps[1:], steps[0]]
    for step in steps:
        assert bench.scheduler.running() == []
        step()
    assert len(bench.scheduler.running()) == 1


def test_the_first_token_is_delivered_while_pulls_go_on() -> None:
    bench = Bench()
    bench.submit("a")
    bench.events()
    bench.scheduler.prefilled("a", WORD, 0.0)
    assert bench.events() == [Delivered("a", WORD)]


def test_a_failed_pull_ends_the_request_naming_rank_and_cause() -> None:
    bench = Bench()
    bench.submit("a")
    generation = bench.generation("a")
    bench.scheduler.pull_ended("a", generation, 1, "prefill-0/tp1 is gone", 0.0)
    ended, released = bench.events()
    assert failure_of(ended) == Failure(
        FailureKind.TRANSFER, "request a: decode rank 1 could not pull its KV: prefill-0/tp1 is gone"
    )
    assert released == Released("a", generation)


def test_reports_of_an_earlier_generation_are_ignored() -> None:
    bench = Bench()
    generation = bench.start("a")
    bench.scheduler.abort("a", 0.0)
    bench.drain("a", generation)
    bench.submit("a")
    bench.events()
    bench.scheduler.pull_ended("a", generation, 0, "late", 0.0)
    bench.scheduler.quiescent("a", generation, 0, 0.0)
    assert bench.events() == []
    assert bench.scheduler.count(Phase.RESERVED) == 1


def test_a_second_first_token_is_an_error() -> None:
    bench = Bench()
    bench.start("a")
    bench.scheduler.prefilled("a", WORD, 0.0)
    assert "request a: a first token while running; legal: once" in failure_of(bench.events()[0]).text


@pytest.mark.parametrize("token", [GeneratedToken(EOS), WORD])
def test_a_request_that_its_first_token_ends_waits_for_its_pulls(token: GeneratedToken) -> None:
    """It never runs; the pulls under way may finish, and only then are its blocks released."""
    bench = Bench()
    bench.submit("a", max_tokens=3 if token.id == EOS else 1)
    generation = bench.generation("a")
    bench.scheduler.pull_ended("a", generation, 0, None, 0.0)
    bench.scheduler.prefilled("a", token, 0.0)
    expected = FinishReason.STOP if token.id == EOS else FinishReason.LENGTH
    assert bench.events() == [Delivered("a", token), Ended("a", expected)]
    bench.scheduler.pull_ended("a", generation, 1, None, 0.0)
    assert bench.events() == [Released("a", generation)]
    assert bench.scheduler.running() == []
    bench.drain("a", generation)
    assert bench.used() == NOTHING


def test_pulls_of_an_answered_request_are_stopped_after_a_lease() -> None:
    bench = Bench()
    bench.submit("a", max_tokens=1)
    generation = bench.generation("a")
    bench.scheduler.prefilled("a", WORD, 100.0)
    bench.scheduler.expire(100.0 + LEASE - 0.1)
    assert Released("a", generation) not in bench.events()
    bench.scheduler.expire(100.0 + LEASE)
    assert bench.events() == [Released("a", generation)]


def test_a_first_token_that_never_comes_ends_the_request() -> None:
    bench = Bench()
    bench.submit("a")
    generation = bench.generation("a")
    for rank in range(RANKS):
        bench.scheduler.pull_ended("a", generation, rank, None, 50.0)
    bench.scheduler.expire(50.0 + LEASE - 0.1)
    assert bench.events() == []
    bench.scheduler.expire(50.0 + LEASE)
    assert failure_of(bench.events()[0]) == Failure(
        FailureKind.TIMEOUT, "request a: no first token for 5 s after its KV had arrived"
    )


def test_a_lost_announcement_ends_the_request_a_lease_after_the_first_token() -> None:
    bench = Bench()
    bench.submit("a")
    generation = bench.generation("a")
    bench.scheduler.prefilled("a", WORD, 50.0)
    bench.events()
    bench.scheduler.pull_ended("a", generation, 0, None, 51.0)
    bench.scheduler.expire(50.0 + LEASE - 0.1)
    assert bench.events() == []
    bench.scheduler.expire(50.0 + LEASE)
    failure = failure_of(bench.events()[0])
    assert failure.kind is FailureKind.TRANSFER and "ranks [1] did not arrive" in failure.text


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.RESERVED, Phase.RUNNING])
def test_a_deadline_ends_a_request_in_every_phase(phase: Phase) -> None:
    bench = Bench()
    if phase is Phase.RUNNING:
        bench.start("a", deadline=10.0)
    else:
        if phase is Phase.WAITING:
            bench.start("other", prompt=37)
        bench.submit("a", deadline=10.0)
        bench.events()
    bench.scheduler.expire(9.9)
    assert bench.events() == []
    bench.scheduler.expire(10.0)
    assert f"request a: not finished in time while {phase.value}" in failure_of(bench.events()[0]).text


# -- running and leaving ---------------------------------------------------------------------------------------------


def test_tokens_are_delivered_until_the_rules_end_it() -> None:
    bench = Bench()
    generation = bench.start("a", max_tokens=3)
    (state,) = bench.scheduler.running()
    assert state.position == 5  # the first token follows prompt positions 0 to 4
    bench.scheduler.commit("a", GeneratedToken(10), 0.0)
    assert state.position == 6
    bench.scheduler.commit("a", GeneratedToken(11), 0.0)
    assert bench.events() == [
        Delivered("a", GeneratedToken(10)),
        Delivered("a", GeneratedToken(11)),
        Ended("a", FinishReason.LENGTH),
        Released("a", generation),
    ]
    assert bench.scheduler.running() == []


def test_a_late_token_of_an_ended_request_is_dropped() -> None:
    bench = Bench()
    bench.start("a")
    bench.scheduler.abort("a", 0.0)
    bench.events()
    bench.scheduler.commit("a", GeneratedToken(10), 0.0)
    assert bench.events() == []


def test_blocks_stay_in_quarantine_until_every_rank_is_quiescent() -> None:
    bench = Bench()
    bench.submit("a", prompt=37)
    generation = bench.generation("a")
    held = bench.used()
    bench.scheduler.quiescent("a", generation, 0, 0.0)  # before the release: means nothing
    bench.scheduler.abort("a", 0.0)
    bench.submit("b")
    bench.scheduler.quiescent("a", generation, 1, 0.0)
    bench.scheduler.quiescent("a", generation, 1, 0.0)
    assert bench.used() == held
    bench.scheduler.quiescent("a", generation, 0, 0.0)
    assert bench.used() != held
    assert bench.scheduler.count(Phase.RESERVED) == 1


def test_a_rank_that_does_not_confirm_its_release_is_named() -> None:
    bench = Bench()
    generation = bench.start("a")
    bench.scheduler.abort("a", 20.0)
    bench.scheduler.quiescent("a", generation, 0, 21.0)
    assert bench.scheduler.stuck_ranks(20.0 + LEASE - 0.1) == {}
    assert bench.scheduler.stuck_ranks(20.0 + LEASE) == {"a": [1]}


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("end", ["abort", "fail", "deadline"])
def test_accounting_returns_to_zero_from_every_phase(phase: Phase, end: str) -> None:
    """However and whenever a request ends, one Ended is told and everything it held is free again, once."""
    bench = Bench()
    blocker = bench.start("blocker", prompt=37) if phase is Phase.WAITING else None
    generation = 0
    if phase in (Phase.RUNNING, Phase.DRAINING):
        generation = bench.start("a", deadline=10.0)
    else:
        bench.submit("a", deadline=10.0)
        if phase is not Phase.WAITING:
            generation = bench.generation("a")
    if phase is Phase.LOADING:
        bench.scheduler.prefilled("a", WORD, 0.0)
    if phase is Phase.DRAINING:
        bench.scheduler.abort("a", 0.0)
    assert bench.scheduler.count(phase) == 1
    if end == "abort":
        bench.scheduler.abort("a", 1.0)
    elif end == "fail":
        bench.scheduler.fail("a", Failure(FailureKind.INTERNAL, "broken"), 1.0)
    else:
        bench.scheduler.expire(11.0)
    bench.scheduler.abort("a", 12.0)  # the session closes after it heard of the end
    events = bench.events()
    assert sum(isinstance(event, Ended) for event in events) == 1
    assert sum(isinstance(event, Released) for event in events) == (phase is not Phase.WAITING)
    bench.drain("a", generation)
    bench.drain("a", generation)
    if blocker is not None:
        bench.scheduler.abort("blocker", 12.0)
        bench.drain("blocker", blocker)
    assert bench.used() == NOTHING
    assert bench.scheduler.count(*Phase) == 0
