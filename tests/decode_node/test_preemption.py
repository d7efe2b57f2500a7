"""Memory grows with the sequences; when it runs out, the request let in last gives way, and nobody is stranded."""

from __future__ import annotations

import pytest

from decode_node.events import Delivered, Ended, Grown, Released, Reserved
from decode_node.finish import FinishReason
from decode_node.kv_room import MAIN
from decode_node.scheduler import Phase
from tests.decode_node.scheduler_bench import WORD, Bench


def preempted(bench: Bench) -> list[str]:
    return [e.request_id for e in bench.events() if isinstance(e, Ended) and e.outcome is FinishReason.PREEMPTED]


def test_blocks_come_as_the_sequence_grows() -> None:
    bench = Bench()
    bench.start("a", prompt=3, max_tokens=10)
    assert bench.used()[MAIN] == 1
    bench.step()
    assert bench.events() == [Delivered("a", WORD)]
    bench.scheduler.next_step(0.0)
    (grown,) = bench.events()
    assert isinstance(grown, Grown)
    assert (grown.request_id, grown.start, len(grown.main_blocks), len(grown.indexer_blocks)) == ("a", 1, 1, 1)
    bench.scheduler.next_step(0.0)
    assert bench.events() == [], "blocks for a step are taken once"


def test_no_request_takes_more_than_its_longest_answer_needs() -> None:
    bench = Bench()
    bench.start("a", prompt=3, max_tokens=5)
    for _ in range(4):
        assert bench.step() == ["a"]
    assert bench.used()[MAIN] == 2


def test_who_lacks_memory_gets_it_from_the_youngest() -> None:
    bench = Bench(blocks=6)
    old = bench.start("old", prompt=7, max_tokens=17)
    bench.start("young", prompt=7, max_tokens=17)
    youngest = bench.start("youngest", prompt=7, max_tokens=17)
    assert bench.used()[MAIN] == 6
    assert bench.step() == ["old", "young", "youngest"]
    assert bench.step() == [], "it is being given back; nobody takes it from the next one meanwhile"
    assert preempted(bench) == ["youngest"]
    assert bench.scheduler.preemptions == 1
    bench.drain("youngest", youngest)
    assert bench.step() == ["old", "young"]
    bench.scheduler.abort("old", 0.0)
    bench.drain("old", old)


def test_the_youngest_gives_way_itself() -> None:
    bench = Bench(blocks=4)
    bench.start("old", prompt=5, max_tokens=9)
    bench.start("young", prompt=7, max_tokens=9)
    assert bench.step() == ["old", "young"]
    assert bench.step() == ["old"]
    assert preempted(bench) == ["young"]


@pytest.mark.parametrize("phase", [Phase.RESERVED, Phase.LOADING])
def test_a_request_that_does_not_run_yet_gives_way_too(phase: Phase) -> None:
    """Prefill may keep it waiting for long; who came first does not wait for that."""
    bench = Bench(blocks=4)
    bench.start("old", prompt=7, max_tokens=9)
    bench.submit("young", prompt=7)
    generation = bench.generation("young")
    if phase is Phase.LOADING:
        bench.scheduler.prefilled("young", WORD, 0.0)
    assert bench.step() == ["old"]
    assert bench.step() == []
    assert preempted(bench) == ["young"]
    bench.drain("young", generation)
    assert bench.step() == ["old"]


def test_a_request_alone_always_finishes() -> None:
    bench = Bench(blocks=5)
    bench.start("a", prompt=1, max_tokens=19)
    for _ in range(18):
        assert bench.step() == ["a"]
    assert bench.scheduler.preemptions == 0


def test_blocks_of_a_preempted_request_stay_in_quarantine() -> None:
    bench = Bench(blocks=4)
    bench.start("old", prompt=7, max_tokens=9)
    young = bench.start("young", prompt=7, max_tokens=9)
    bench.step()
    bench.step()
    assert Released("young", young) in bench.events()
    bench.scheduler.quiescent("young", young, 0, 0.0)
    assert bench.step() == []
    bench.scheduler.quiescent("young", young, 1, 0.0)
    assert bench.step() == ["old"]


def test_a_request_enters_only_with_headroom_for_everyone() -> None:
    """Field failure B20: a preempted request that comes back at once would be preempted again at once."""
    bench = Bench(blocks=6, headroom=8)
    bench.start("a", prompt=7, max_tokens=9)
    bench.submit("b", prompt=7, max_tokens=13, resumed=True)
    assert bench.scheduler.count(Phase.WAITING) == 1, "2 + 2 blocks now, but 4 + 4 with the headroom"
    bench.submit("c", prompt=1, max_tokens=1)
    assert bench.scheduler.count(Phase.WAITING) == 2, "new requests do not overtake"


def test_headroom_is_never_more_than_a_request_needs() -> None:
    bench = Bench(blocks=4, headroom=1000)
    bench.start("a", prompt=5, max_tokens=3)
    bench.start("b", prompt=5, max_tokens=3)


def test_resumed_requests_go_ahead_of_new_ones_and_are_never_refused() -> None:
    bench = Bench(max_waiting=1)
    first = bench.start("a", prompt=37)
    bench.submit("new")
    bench.submit("again", resumed=True)
    bench.submit("again too", resumed=True)
    bench.scheduler.abort("a", 0.0)
    bench.drain("a", first)
    assert [e.request_id for e in bench.events() if isinstance(e, Reserved)] == ["again", "again too", "new"]
