"""Which requests hold memory, wait for their KV, run, or leave. Pure: no tensors, no sockets, no clock of its own."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from decode_node.events import (
    Delivered,
    Ended,
    Event,
    Failure,
    FailureKind,
    GeneratedToken,
    Grown,
    Refused,
    Released,
    Reserved,
)
from decode_node.finish import FinishReason, FinishRules
from decode_node.kv_room import HOT_ROWS, INDEXER, MAIN, KvRoom, Need
from engine.kv_cache import KVCacheManager, Usage


class Phase(enum.Enum):
    """Where a request is; it only moves downwards."""

    WAITING = "waiting"  # holds nothing
    RESERVED = "reserved"  # holds what its prompt and first step need; its prefill has not finished
    LOADING = "loading"  # its first token is known; some rank still pulls
    RUNNING = "running"  # computed in every step
    DRAINING = "draining"  # ended; its blocks are in quarantine until every rank is quiescent


_HOLDING = (Phase.RESERVED, Phase.LOADING, Phase.RUNNING)


@dataclass(frozen=True)
class DecodeRequest:
    """What is asked of decode."""

    request_id: str
    prompt_tokens: int
    rules: FinishRules
    deadline: float  # monotonic seconds
    resumed: bool = False  # it goes on with an interrupted request, ahead of new ones

    @property
    def total_tokens(self) -> int:
        """Most tokens it can ever need memory for."""
        return self.prompt_tokens + self.rules.sampling.max_tokens


@dataclass
class RequestState:
    """A request on its way through the phases. Only the scheduler writes it."""

    request: DecodeRequest
    phase: Phase = Phase.WAITING
    generation: int = 0  # of its reservation
    row: int = -1
    tokens: list[int] = field(default_factory=list)  # generated ones
    drafts: tuple[int, ...] = ()  # guessed behind them, for the next step to verify
    pulled: set[int] = field(default_factory=set)  # ranks whose pulls are terminal
    quiescent: set[int] = field(default_factory=set)  # ranks without a read in flight, after the release
    released: bool = False
    lease_end: float = math.inf

    @property
    def position(self) -> int:
        """Position of the newest token, which the next step computes."""
        return self.request.prompt_tokens + len(self.tokens) - 1

    @property
    def last_position(self) -> int:
        """The last position worth computing: the token sampled there is the request's last one."""
        return min(self.request.total_tokens, self.request.rules.max_context) - 2

    def need(self, step_tokens: int) -> Need:
        """What its next step, or its first one, takes."""
        position, most = max(self.position, self.request.prompt_tokens), self.request.total_tokens
        return Need(self.request.request_id, min(most, position + step_tokens), most)


@dataclass(frozen=True)
class SchedulerLimits:
    """`lease_s`: longest wait for the first token when the KV is there, for the KV when the first token is (prefill has
    announced everything by then, and nobody can read it for longer), and for the ranks when a request has ended.

    Silence before is noticed by each rank's puller, which knows of every batch.
    `step_tokens`: tokens one step adds to a sequence at most. `headroom_tokens`: see KvRoom.
    """

    ranks: int
    max_waiting: int
    max_request_tokens: int
    lease_s: float
    step_tokens: int = 1
    headroom_tokens: int = 0


class Scheduler:
    """Owns every request of one DP rank from admission until its last block is free.

    Its methods record what must happen next; `take_events` hands that over, in order.

    Invariants:
    * all or nothing (test_a_request_holds_every_region_or_none): a request waits for blocks of both caches for its
      prompt and first step and a hot row, taken together, in first-come order, resumed requests first.
    * the oldest wins (test_who_lacks_memory_gets_it_from_the_youngest): blocks grow with the sequence; when there are
      none, the request let in last is preempted. So the one let in first always comes to its end, then the next.
    * destination quarantine (test_blocks_stay_in_quarantine_until_every_rank_is_quiescent).
    * two completions (test_runs_only_with_first_token_and_every_rank_pulled).
    * one exit (test_accounting_returns_to_zero_from_every_phase): `_free` alone gives memory back, once per request.
    """

    def __init__(self, kv: KVCacheManager, limits: SchedulerLimits) -> None:
        self._room = KvRoom(kv, limits.headroom_tokens)
        self._limits = limits
        self._all_ranks = set(range(limits.ranks))
        self._requests: dict[str, RequestState] = {}
        self._waiting: deque[RequestState] = deque()
        self._generation = 0
        self._events: list[Event] = []
        self.preemptions = 0  # monotonic

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def usage(self) -> Mapping[str, Usage]:
        return self._room.usage()

    def count(self, *phases: Phase) -> int:
        return sum(state.phase in phases for state in self._requests.values())

    def running(self) -> list[RequestState]:
        """The requests that are computed, in the order they were let in."""
        return self._in(Phase.RUNNING)

    # -- admission ---------------------------------------------------------------------------------------------------

    def submit(self, request: DecodeRequest, now: float) -> None:
        """Reserves the request's memory, or queues it. Raises Refused."""
        rid, limits = request.request_id, self._limits
        if rid in self._requests:
            raise Refused(Failure(FailureKind.DUPLICATE, f"request {rid}: a request with this id has not left yet"))
        if request.prompt_tokens < 1:
            raise Refused(Failure(FailureKind.INVALID, f"request {rid}: the prompt is empty; legal: 1 token or more"))
        if request.total_tokens > limits.max_request_tokens:
            raise Refused(
                Failure(
                    FailureKind.INVALID,
                    f"request {rid}: {request.prompt_tokens} prompt tokens + max_tokens = "
                    f"{request.rules.sampling.max_tokens} can never fit; decode holds at most "
                    f"{limits.max_request_tokens} tokens of one request",
                )
            )
        state = RequestState(request)
        self._requests[rid] = state
        first_new = sum(waiting.request.resumed for waiting in self._waiting)
        self._waiting.insert(first_new if request.resumed else len(self._waiting), state)
        self.reserve(now)
        if len(self._waiting) > limits.max_waiting and not request.resumed:
            self._waiting.pop()
            del self._requests[rid]
            raise Refused(
                Failure(
                    FailureKind.QUEUE_FULL,
                    f"request {rid}: {limits.max_waiting} requests already wait for decode memory "
                    "(decode.max_waiting); try again later",
                )
            )

    def reserve(self, now: float) -> None:
        """Gives memory to waiting requests, in order, as long as the first one fits."""
        while self._waiting:
            state, step_tokens = self._waiting[0], self._limits.step_tokens
            request, need = state.request, state.need(step_tokens)
            inside = [other.need(step_tokens) for other in self._in(*_HOLDING)]
            if not self._room.can_enter(need, inside):
                return
            self._waiting.popleft()
            blocks = self._room.enter(need)
            self._generation += 1
            state.phase, state.generation, state.row = Phase.RESERVED, self._generation, blocks[HOT_ROWS][0]
            self._events.append(
                Reserved(
                    request_id=request.request_id,
                    generation=state.generation,
                    row=state.row,
                    main_blocks=tuple(blocks[MAIN]),
                    indexer_blocks=tuple(blocks[INDEXER]),
                    prompt_tokens=request.prompt_tokens,
                )
            )

    # -- loading -----------------------------------------------------------------------------------------------------

    def prefilled(self, request_id: str, token: GeneratedToken, now: float) -> None:
        """Prefill sampled the first token: it is delivered at once. Ignored for a request that has ended."""
        state = self._requests.get(request_id)
        if state is None or state.phase is Phase.DRAINING:
            return
        if state.phase is not Phase.RESERVED:
            text = f"request {request_id}: a first token while {state.phase.value}; legal: once, after its destination"
            self._end(state, Failure(FailureKind.INVALID, text), now)
            return
        state.phase = Phase.LOADING
        state.lease_end = now + self._limits.lease_s
        self._deliver(state, token, now)
        self._run_if_complete(state)

    def pull_ended(self, request_id: str, generation: int, rank: int, error: str | None, now: float) -> None:
        """`rank` will pull nothing more for the request. Late and duplicate reports are ignored."""
        state = self._find(request_id, generation)
        if state is None:
            return
        state.pulled.add(rank)
        if error is not None and state.phase is not Phase.DRAINING:
            text = f"request {request_id}: decode rank {rank} could not pull its KV: {error}"
            self._end(state, Failure(FailureKind.TRANSFER, text), now)
        elif state.pulled == self._all_ranks:
            if state.phase is Phase.RESERVED:
                state.lease_end = now + self._limits.lease_s
            elif state.phase is Phase.DRAINING:
                self._release(state, now)
            self._run_if_complete(state)

    # -- growing -----------------------------------------------------------------------------------------------------

    def next_step(self, now: float) -> list[RequestState]:
        """The running requests with memory for their next step. The others sit it out until there is some."""
        return [state for state in self.running() if self._make_room(state, now)]

    def _make_room(self, state: RequestState, now: float) -> bool:
        """Gives a running request memory for its next step, taking it from those let in last if there is no other.

        False if it must wait, for memory that is being given back, or was preempted itself.
        """
        need = state.need(self._limits.step_tokens)
        while state.phase is Phase.RUNNING:
            if self._room.can_grow(need, leaving=()):
                blocks = self._room.grow(need)
                if blocks.main:
                    self._events.append(Grown(need.request_id, state.row, blocks.start, blocks.main, blocks.indexer))
                return True
            leaving = [other.request.request_id for other in self._in(Phase.DRAINING)]
            if self._room.can_grow(need, leaving):
                return False
            self.preemptions += 1
            self._end(self._in(*_HOLDING)[-1], FinishReason.PREEMPTED, now)
        return False

    # -- running and leaving -----------------------------------------------------------------------------------------

    def commit(self, request_id: str, token: GeneratedToken, now: float) -> None:
        """A step computed the request's next token. Ignored for one that has ended, perhaps by the token before."""
        state = self._requests.get(request_id)
        if state is not None and state.phase is Phase.RUNNING:
            self._deliver(state, token, now)

    def draft(self, request_id: str, tokens: tuple[int, ...]) -> None:
        """The next step shall verify `tokens` behind the request's newest one. Ignored for one that has ended."""
        state = self._requests.get(request_id)
        if state is not None and state.phase is Phase.RUNNING:
            state.drafts = tokens

    def fail(self, request_id: str, failure: Failure, now: float) -> None:
        """Ends the request badly, wherever it is. Ignored for one that has ended."""
        state = self._requests.get(request_id)
        if state is not None and state.phase is not Phase.DRAINING:
            self._end(state, failure, now)

    def abort(self, request_id: str, now: float) -> None:
        """The session is gone: ends the request, wherever it is. Ignored for one that has ended."""
        state = self._requests.get(request_id)
        if state is not None and state.phase is not Phase.DRAINING:
            self._end(state, FinishReason.ABORTED, now)

    def quiescent(self, request_id: str, generation: int, rank: int, now: float) -> None:
        """`rank` confirms that nothing writes into the request's blocks any more."""
        state = self._find(request_id, generation)
        if state is None or not state.released:
            return
        state.quiescent.add(rank)
        if state.quiescent == self._all_ranks:
            self._free(state)
            self.reserve(now)

    def expire(self, now: float) -> None:
        """Ends what has waited too long: for a first token, for pulls of an answered request, past its deadline."""
        for state in list(self._requests.values()):
            rid = state.request.request_id
            if state.phase is Phase.DRAINING:
                if now >= state.lease_end:
                    self._release(state, now)
            elif now >= state.request.deadline:
                text = f"request {rid}: not finished in time while {state.phase.value} (runtime.request_timeout_s)"
                self._end(state, Failure(FailureKind.TIMEOUT, text), now)
            elif now >= state.lease_end and state.phase is Phase.LOADING:
                missing = sorted(self._all_ranks - state.pulled)
                text = f"request {rid}: prefill is done, but the KV of ranks {missing} did not arrive within a lease"
                self._end(state, Failure(FailureKind.TRANSFER, text), now)
            elif now >= state.lease_end:
                text = f"request {rid}: no first token for {self._limits.lease_s:g} s after its KV had arrived"
                self._end(state, Failure(FailureKind.TIMEOUT, text), now)

    def stuck_ranks(self, now: float) -> dict[str, list[int]]:
        """Requests whose ranks did not confirm their release within a lease, with those ranks. Normally empty."""
        return {
            rid: sorted(self._all_ranks - state.quiescent)
            for rid, state in self._requests.items()
            if state.released and now >= state.lease_end
        }

    # -- transitions -------------------------------------------------------------------------------------------------

    def _in(self, *phases: Phase) -> list[RequestState]:
        """The requests in these phases, in the order they were let in."""
        found = [state for state in self._requests.values() if state.phase in phases]
        return sorted(found, key=lambda state: state.generation)

    def _find(self, request_id: str, generation: int) -> RequestState | None:
        state = self._requests.get(request_id)
        return state if state is not None and state.generation == generation else None

    def _run_if_complete(self, state: RequestState) -> None:
        if state.phase is Phase.LOADING and state.pulled == self._all_ranks:
            state.phase = Phase.RUNNING
            state.lease_end = math.inf

    def _deliver(self, state: RequestState, token: GeneratedToken, now: float) -> None:
        request = state.request
        state.tokens.append(token.id)
        self._events.append(Delivered(request.request_id, token))
        reason = request.rules.reason(token.id, len(state.tokens), request.prompt_tokens)
        if reason is not None:
            self._end(state, reason, now)

    def _end(self, state: RequestState, outcome: FinishReason | Failure, now: float) -> None:
        """Every end passes here once. A good end lets running pulls finish first; any other stops them."""
        self._events.append(Ended(state.request.request_id, outcome))
        if state.phase is Phase.WAITING:
            self._waiting.remove(state)
            self._free(state)
            return
        state.phase = Phase.DRAINING
        well = outcome in (FinishReason.STOP, FinishReason.LENGTH)
        if well and state.pulled != self._all_ranks:
            state.lease_end = now + self._limits.lease_s
        else:
            self._release(state, now)

    def _release(self, state: RequestState, now: float) -> None:
        if state.released:
            return
        state.released = True
        state.lease_end = now + self._limits.lease_s
        self._events.append(Released(state.request.request_id, state.generation))

    def _free(self, state: RequestState) -> None:
        self._room.leave(state.request.request_id)
        del self._requests[state.request.request_id]
