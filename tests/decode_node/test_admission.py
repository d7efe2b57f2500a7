"""The scheduler alone: who is let in, who waits, who is refused."""

from __future__ import annotations

import pytest

from decode_node.events import (
    Ended,
    FailureKind,
    Refused,
    Reserved,
)
from decode_node.kv_room import HOT_ROWS, INDEXER, MAIN
from decode_node.scheduler import Phase
from tests.decode_node.scheduler_bench import Bench


@pytest.mark.parametrize(("prompt", "max_tokens", "blocks"), [(5, 30, 2), (7, 1, 2), (8, 30, 3), (8, 1, 3)])
def test_a_reservation_covers_prompt_and_first_step(prompt: int, max_tokens: int, blocks: int) -> None:
    bench = Bench()
    bench.submit("a", prompt=prompt, max_tokens=max_tokens)
    (event,) = bench.events()
    assert isinstance(event, Reserved)
    assert (event.request_id, event.prompt_tokens) == ("a", prompt)
    assert len(event.main_blocks) == len(event.indexer_blocks) == blocks
    assert bench.used() == {MAIN: blocks, INDEXER: blocks, HOT_ROWS: 1}


@pytest.mark.parametrize(("blocks", "rows"), [(4, 3), (10, 1)])
def test_a_request_holds_every_region_or_none(blocks: int, rows: int) -> None:
    """Whichever region is short, the second request gets nothing, and everything once the first one has left."""
    bench = Bench(blocks=blocks, rows=rows)
    first = bench.start("a", prompt=9)
    held = bench.used()
    bench.submit("b", prompt=9)
    assert bench.used() == held
    assert bench.events() == []
    assert bench.scheduler.count(Phase.WAITING) == 1
    bench.scheduler.abort("a", 0.0)
    bench.drain("a", first)
    assert bench.used() == {MAIN: 3, INDEXER: 3, HOT_ROWS: 1}
    assert bench.scheduler.count(Phase.RESERVED) == 1


def test_waiting_is_first_come_first_served() -> None:
    """A small request does not overtake the head of the queue, which could otherwise starve."""
    bench = Bench()
    first = bench.start("big", prompt=29)
    bench.submit("big-too", prompt=29)
    bench.submit("small", prompt=1)
    assert bench.scheduler.count(Phase.WAITING) == 2
    bench.scheduler.abort("big", 0.0)
    bench.drain("big", first)
    reserved = [event.request_id for event in bench.events() if isinstance(event, Reserved)]
    assert reserved == ["big-too", "small"]


def test_a_waiting_request_that_leaves_lets_the_next_one_in() -> None:
    bench = Bench()
    bench.start("a", prompt=21)
    bench.submit("big", prompt=29)
    bench.submit("small", prompt=1)
    bench.scheduler.abort("big", 0.0)
    bench.scheduler.reserve(0.0)
    assert isinstance(bench.events()[0], Ended)
    assert bench.scheduler.count(Phase.RESERVED) == 1


def test_what_can_never_fit_is_refused_at_once() -> None:
    bench = Bench()
    with pytest.raises(Refused, match=r"request a: 38 prompt tokens \+ max_tokens = 3 can never fit.*at most 40"):
        bench.submit("a", prompt=38)
    bench.submit("a", prompt=37)
    assert bench.scheduler.count(Phase.RESERVED) == 1


def test_a_full_queue_refuses() -> None:
    bench = Bench(max_waiting=1)
    bench.start("a", prompt=37)
    bench.submit("b")
    with pytest.raises(Refused, match=r"request c: 1 requests already wait.*decode.max_waiting") as refused:
        bench.submit("c")
    assert refused.value.failure.kind is FailureKind.QUEUE_FULL
    assert bench.scheduler.count(Phase.WAITING) == 1


def test_an_id_is_refused_until_its_last_block_is_free() -> None:
    bench = Bench()
    generation = bench.start("a")
    with pytest.raises(Refused, match="request a: a request with this id has not left yet"):
        bench.submit("a")
    bench.scheduler.abort("a", 0.0)
    with pytest.raises(Refused, match="has not left yet"):
        bench.submit("a")
    bench.drain("a", generation)
    bench.submit("a")
    again = bench.events()[-1]
    assert isinstance(again, Reserved)
    assert again.generation > generation


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(Refused, match="request a: the prompt is empty"):
        Bench().submit("a", prompt=0)
