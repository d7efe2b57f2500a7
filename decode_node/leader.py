"""The engine loop of TP rank 0: schedules, leads the other ranks through every step, samples, delivers."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from decode_node.commands import PullEnded, Quiescent, Report, StepRow, Turn
from decode_node.events import (
    Delivered,
    Ended,
    Failure,
    FailureKind,
    GeneratedToken,
    Grown,
    Refused,
    Released,
    Reserved,
)
from decode_node.faults import HostRowEraser
from decode_node.finish import FinishReason
from decode_node.inbox import Cancel, FirstToken, Inbox, Message, OwnReport, SessionSink, Submit
from decode_node.rank import Rank
from decode_node.scheduler import Phase, RequestState, Scheduler
from engine.kv_cache import Usage
from engine.sampling import Sampled
from engine.tp_channel import TpLeader

log = logging.getLogger(__name__)
IDLE_WAIT_S = 0.1  # longest sleep of the loop: leases are looked at this often
PEER_POLL_S = 0.002  # how often follower reports are looked at while one is expected


@dataclass(frozen=True)
class Snapshot:
    """The scheduler's state after a turn; replaced as a whole, so any thread may read it."""

    running: int
    waiting: int
    usage: dict[str, Usage]
    context_tokens: tuple[int, ...]  # of the running requests
    preemptions: int


class LeaderLoop:
    """Runs on one thread, the only one that touches the scheduler; other threads reach it through its inbox.

    A request whose computation fails ends alone: bad logits end only their own row; an exception in a step ends the
    requests of that step. With several ranks such an exception means that they are out of step: it ends the loop.
    """

    def __init__(
        self,
        inbox: Inbox,
        scheduler: Scheduler,
        rank: Rank,
        channel: TpLeader,
        ranks: int,
        eraser: HostRowEraser | None = None,
    ) -> None:
        self._inbox = inbox
        self._scheduler = scheduler
        self._rank = rank
        self._channel = channel
        self._ranks = ranks
        self._eraser = eraser
        self._sinks: dict[str, SessionSink] = {}
        self._reserved: list[Reserved] = []  # for the next turn
        self._grown: list[Grown] = []
        self._released: list[Released] = []
        self._starved = False  # whether all running requests wait for memory that is being given back
        self._stopping = threading.Event()
        self._clock = time.monotonic
        self.snapshot = self._take_snapshot()

    def stop(self) -> None:
        """Ends every session (what is left of it may run elsewhere) and the loop, after its current turn.

        Callable from any thread.
        """
        self._stopping.set()
        self._inbox.wake()

    def run(self) -> None:
        """Returns after `stop`. RuntimeError when this rank or another cannot go on."""
        try:
            while not self._stopping.is_set():
                self.turn(self._patience())
        except Exception as error:
            for rid, sink in self._sinks.items():
                text = f"request {rid}: the decode worker failed: {error}"
                sink.deliver(Ended(rid, Failure(FailureKind.STOPPING, text)))
            raise
        for rid, sink in self._sinks.items():
            sink.deliver(Ended(rid, FinishReason.PREEMPTED))

    def turn(self, wait_s: float) -> None:
        """One round: hear what is new (waiting up to `wait_s` for it), schedule, compute at most one step."""
        self._hear(wait_s)
        now = self._clock()
        self._scheduler.expire(now)
        self._scheduler.reserve(now)
        self._check_health(now)
        states = self._scheduler.next_step(now)
        self._dispatch()
        self._starved = not states
        turn = self._plan(states)
        if turn:
            self._channel.broadcast(turn)
            self._rank.take_in_and_let_go(turn)
        if turn.step:
            self._compute(turn.step)
            self._dispatch()
        self.snapshot = self._take_snapshot()

    def _patience(self) -> float:
        phases = self._scheduler.count
        if self._reserved or self._released:
            return 0.0
        if phases(Phase.RUNNING):
            return PEER_POLL_S if self._starved else 0.0
        if self._ranks > 1 and phases(Phase.RESERVED, Phase.LOADING, Phase.DRAINING):
            return PEER_POLL_S
        return IDLE_WAIT_S

    def _hear(self, wait_s: float) -> None:
        for message in self._inbox.take(wait_s):
            self._handle(message)
        for rank, report in self._channel.reports():
            self._handle_report(rank, report)

    def _handle(self, message: Message) -> None:
        now = self._clock()
        match message:
            case Submit(request, sink):
                try:
                    self._scheduler.submit(request, now)
                    self._sinks[request.request_id] = sink
                except Refused as refused:
                    sink.deliver(Ended(request.request_id, refused.failure))
            case FirstToken(rid, token):
                self._scheduler.prefilled(rid, token, now)
            case Cancel(rid, sink):
                if self._sinks.get(rid) is sink:
                    del self._sinks[rid]
                    self._scheduler.abort(rid, now)
            case OwnReport(report):
                self._handle_report(0, report)

    def _handle_report(self, rank: int, report: Report) -> None:
        now = self._clock()
        match report:
            case PullEnded(rid, generation, error):
                self._scheduler.pull_ended(rid, generation, rank, error, now)
            case Quiescent(rid, generation):
                self._scheduler.quiescent(rid, generation, rank, now)
            case _:
                log.warning("rank %d reported %r, which nobody asked for", rank, report)

    def _check_health(self, now: float) -> None:
        if self._rank.source.failure is not None:
            raise RuntimeError(f"the puller died: {self._rank.source.failure}")
        for rid, ranks in self._scheduler.stuck_ranks(now).items():
            raise RuntimeError(f"request {rid}: ranks {ranks} did not confirm that they let go of its blocks")

    def _dispatch(self) -> None:
        """Tokens and ends go to their sessions at once, what concerns memory to the ranks with the next turn."""
        for event in self._scheduler.take_events():
            match event:
                case Released():
                    self._released.append(event)
                case Grown():
                    self._grown.append(event)
                case Reserved():
                    self._reserved.append(event)
                    self._deliver(event)
                case _:
                    self._deliver(event)

    def _plan(self, states: list[RequestState]) -> Turn:
        reserved, self._reserved = tuple(self._reserved), []
        grown, self._grown = tuple(self._grown), []
        released, self._released = tuple(self._released), []
        if self._eraser is not None:
            for state in states:
                self._eraser.before_step(state)
        return Turn(reserved, grown, released, tuple(_step_row(state) for state in states))

    def _deliver(self, event: Reserved | Delivered | Ended) -> None:
        sink = self._sinks.get(event.request_id)
        if sink is not None:
            sink.deliver(event)
        if isinstance(event, Ended):
            self._sinks.pop(event.request_id, None)

    def _compute(self, rows: tuple[StepRow, ...]) -> None:
        try:
            result = self._rank.step(rows)
        except Exception as error:
            if self._ranks > 1:
                raise
            log.exception("a step of %d requests failed", len(rows))
            for row in rows:
                text = f"request {row.request_id}: its step at position {row.position} failed: {error}"
                self._scheduler.fail(row.request_id, Failure(FailureKind.INTERNAL, text), self._clock())
            return
        for row, verdict, draft in zip(rows, result.verdicts, result.drafts, strict=True):
            for token in verdict.tokens:
                self._scheduler.commit(row.request_id, _generated(token), self._clock())
            if verdict.error:
                self._scheduler.fail(row.request_id, Failure(FailureKind.INTERNAL, verdict.error), self._clock())
            self._scheduler.draft(row.request_id, draft)

    def _take_snapshot(self) -> Snapshot:
        return Snapshot(
            running=self._scheduler.count(Phase.RUNNING),
            waiting=self._scheduler.count(Phase.WAITING, Phase.RESERVED, Phase.LOADING),
            usage=dict(self._scheduler.usage()),
            context_tokens=tuple(state.position + 1 for state in self._scheduler.running()),
            preemptions=self._scheduler.preemptions,
        )


def _step_row(state: RequestState) -> StepRow:
    return StepRow(
        request_id=state.request.request_id,
        row=state.row,
        generation=state.generation,
        tokens=(state.tokens[-1], *state.drafts),
        position=state.position,
        last_position=state.last_position,
        sampling=state.request.rules.sampling,
    )


def _generated(sampled: Sampled) -> GeneratedToken:
    return GeneratedToken(sampled.token, sampled.logprob, sampled.top_logprobs)
