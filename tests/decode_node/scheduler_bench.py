"""A decode scheduler alone, for tests: no tensors and no clock."""

from __future__ import annotations

from typing import Any

from decode_node.events import (
    Ended,
    Event,
    Failure,
    GeneratedToken,
    Reserved,
)
from decode_node.finish import FinishRules
from decode_node.kv_room import HOT_ROWS, INDEXER, MAIN
from decode_node.scheduler import DecodeRequest, Scheduler, SchedulerLimits
from engine.kv_cache import CacheSpec, KVCacheManager
from engine.sampling_params import SamplingParams

BLOCK, BLOCKS, ROWS, RANKS, LEASE = 4, 10, 3, 2, 5.0
EOS = 2
WORD = GeneratedToken(9)


class Bench:
    """A scheduler with `RANKS` ranks, and shorthands."""

    def __init__(self, blocks: int = BLOCKS, rows: int = ROWS, max_waiting: int = 4, headroom: int = 0) -> None:
        specs = {MAIN: CacheSpec(BLOCK, blocks), INDEXER: CacheSpec(BLOCK, BLOCKS), HOT_ROWS: CacheSpec(1000, rows)}
        limits = SchedulerLimits(RANKS, max_waiting, blocks * BLOCK, LEASE, headroom_tokens=headroom)
        self.scheduler = Scheduler(KVCacheManager(specs), limits)

    def submit(
        self,
        rid: str,
        prompt: int = 5,
        deadline: float = 1e9,
        now: float = 0.0,
        resumed: bool = False,
        **sampling: Any,
    ) -> None:
        rules = FinishRules(SamplingParams(**{"max_tokens": 3, **sampling}), frozenset({EOS}), 1000)
        self.scheduler.submit(DecodeRequest(rid, prompt, rules, deadline, resumed), now)

    def events(self) -> list[Event]:
        return self.scheduler.take_events()

    def generation(self, rid: str) -> int:
        return next(e.generation for e in self.events() if isinstance(e, Reserved) and e.request_id == rid)

    def start(self, rid: str, **options: Any) -> int:
        """Brings a request to RUNNING with one token; returns its generation."""
        self.submit(rid, **options)
        generation = self.generation(rid)
        self.scheduler.prefilled(rid, WORD, 0.0)
        for rank in range(RANKS):
            self.scheduler.pull_ended(rid, generation, rank, None, 0.0)
        assert [state.request.request_id for state in self.scheduler.running()][-1] == rid
        self.events()
        return generation

    def step(self) -> list[str]:
        """One decode step: who took part in it."""
        states = self.scheduler.next_step(0.0)
        for state in states:
            self.scheduler.commit(state.request.request_id, WORD, 0.0)
        return [state.request.request_id for state in states]

    def drain(self, rid: str, generation: int) -> None:
        for rank in range(RANKS):
            self.scheduler.quiescent(rid, generation, rank, 0.0)

    def used(self) -> dict[str, int]:
        return {name: usage.used for name, usage in self.scheduler.usage().items()}


NOTHING = {MAIN: 0, INDEXER: 0, HOT_ROWS: 0}


def failure_of(event: Event) -> Failure:
    assert isinstance(event, Ended)
    assert isinstance(event.outcome, Failure)
    return event.outcome
