"""Whatever happens in whatever order: requests come, grow, are preempted and come back, are cancelled, and all end."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from decode_node.events import Delivered, Ended, GeneratedToken, Grown, Released, Reserved
from decode_node.finish import FinishReason, FinishRules
from decode_node.kv_room import HOT_ROWS, INDEXER, MAIN
from decode_node.scheduler import DecodeRequest, Scheduler, SchedulerLimits
from engine.kv_cache import CacheSpec, KVCacheManager
from engine.sampling_params import SamplingParams

BLOCK, BLOCKS, ROWS, MOST_REQUESTS = 4, 12, 4, 6
WORD = GeneratedToken(9)


@dataclass
class Run:
    """One stay of a request in the scheduler, as the meta server and the ranks see it."""

    prompt: int
    left: int  # tokens it still has to deliver
    blocks: list[int] = field(default_factory=list)


class Lives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        specs = {MAIN: CacheSpec(BLOCK, BLOCKS), INDEXER: CacheSpec(BLOCK, BLOCKS), HOT_ROWS: CacheSpec(1000, ROWS)}
        limits = SchedulerLimits(1, MOST_REQUESTS, BLOCKS * BLOCK, 5.0, headroom_tokens=BLOCK)
        self.scheduler = Scheduler(KVCacheManager(specs), limits)
        self.number = 0
        self.open: dict[str, Run] = {}  # in the scheduler
        self.holding: dict[str, Run] = {}  # has blocks, perhaps in quarantine only
        self.away: list[Run] = []  # preempted, not back yet
        self.prefilling: list[tuple[str, int]] = []
        self.releases: list[tuple[str, int]] = []

    def enter(self, run: Run, resumed: bool) -> None:
        self.number += 1
        rid = f"r{self.number}"
        self.open[rid] = run
        rules = FinishRules(SamplingParams(max_tokens=run.left, temperature=0), frozenset(), 1000)
        self.scheduler.submit(DecodeRequest(rid, run.prompt, rules, 1e9, resumed), 0.0)
        self.hear()

    def hear(self) -> None:
        for event in self.scheduler.take_events():
            rid = event.request_id
            match event:
                case Reserved():
                    self.holding[rid] = self.open[rid]
                    self.open[rid].blocks = list(event.main_blocks)
                    self.prefilling.append((rid, event.generation))
                case Grown():
                    assert event.start == len(self.open[rid].blocks)
                    self.open[rid].blocks += event.main_blocks
                case Delivered():
                    self.open[rid].prompt += 1
                    self.open[rid].left -= 1
                case Ended(outcome=outcome):
                    run = self.open.pop(rid)
                    assert outcome in (FinishReason.LENGTH, FinishReason.PREEMPTED, FinishReason.ABORTED)
                    assert (run.left == 0) == (outcome is FinishReason.LENGTH)
                    if outcome is FinishReason.PREEMPTED:
                        self.away.append(Run(run.prompt, run.left))
                case Released():
                    self.releases.append((rid, event.generation))

    @precondition(lambda self: len(self.open) + len(self.away) < MOST_REQUESTS)
    @rule(prompt=st.integers(1, 12), tokens=st.integers(1, 36))
    def arrive(self, prompt: int, tokens: int) -> None:
        self.enter(Run(prompt, tokens), resumed=False)

    @precondition(lambda self: self.away)
    @rule()
    def come_back(self) -> None:
        self.enter(self.away.pop(0), resumed=True)

    @precondition(lambda self: self.prefilling)
    @rule()
    def prefill(self) -> None:
        rid, generation = self.prefilling.pop(0)
        self.scheduler.prefilled(rid, WORD, 0.0)
        self.scheduler.pull_ended(rid, generation, 0, None, 0.0)
        self.hear()

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        states = self.scheduler.next_step(0.0)
        self.hear()
        for state in states:
            run = self.holding[state.request.request_id]
            assert len(run.blocks) * BLOCK > state.position, "the step writes to memory that is not the request's"
            self.scheduler.commit(state.request.request_id, WORD, 0.0)
        self.hear()

    @precondition(lambda self: self.releases)
    @rule()
    def let_go(self) -> None:
        rid, generation = self.releases.pop(0)
        self.holding.pop(rid)
        self.scheduler.quiescent(rid, generation, 0, 0.0)
        self.hear()

    @precondition(lambda self: self.open)
    @rule(choice=st.integers(0, MOST_REQUESTS - 1))
    def cancel(self, choice: int) -> None:
        self.scheduler.abort(sorted(self.open)[choice % len(self.open)], 0.0)
        self.hear()

    @invariant()
    def no_block_belongs_to_two(self) -> None:
        held = [block for run in self.holding.values() for block in run.blocks]
        assert len(held) == len(set(held)) == self.scheduler.usage()[MAIN].used

    @invariant()
    def all_or_nothing(self) -> None:
        usage = self.scheduler.usage()
        assert usage[MAIN].used == usage[INDEXER].used
        assert usage[HOT_ROWS].used == len(self.holding)

    def teardown(self) -> None:
        """Nobody is stranded: when everything goes on, every request ends, and the pools are empty."""
        for _ in range(MOST_REQUESTS * (BLOCKS * BLOCK + 20)):
            for act, possible in (
                (self.prefill, self.prefilling),
                (self.come_back, self.away),
                (self.let_go, self.releases),
            ):
                while possible:
                    act()
            self.step()
            if not (self.open or self.away or self.releases):
                break
        assert not self.open and not self.away
        assert all(usage.used == 0 for usage in self.scheduler.usage().values())


def test_nobody_is_stranded_and_pools_return_to_zero() -> None:
    run_state_machine_as_test(Lives, settings=settings(max_examples=80, stateful_step_count=60, deadline=None))
