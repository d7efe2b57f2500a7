"""The engine thread of TP rank 0: takes requests in, decides steps, samples first tokens, ends requests."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sluice.v1 import worker_pb2

from engine.kv_cache import Usage
from engine.sampling import Sampled
from engine.sampling_params import SamplingParams
from engine.tp_channel import ChannelError, TpLeader
from prefill_node.first_tokens import sample_first_tokens
from prefill_node.outcome import FailureKind, Outcome, PrefillFailure, PrefillResult
from prefill_node.rank import PrefillRank
from prefill_node.scheduler import PrefillJob, PrefillScheduler, Refused
from prefill_node.steps import (
    Drop,
    OpenRoute,
    RequestErrors,
    RouteOpened,
    StepDone,
    StepPlan,
    Stop,
)

log = logging.getLogger(__name__)
_IDLE_S = 0.05  # longest sleep of an idle engine thread
_BUSY_POLL_S = 0.001  # between looks for reports that are about to come


class RankLost(RuntimeError):
    """A rank of the group did not finish a step in time."""


class LeaderCounters(NamedTuple):
    prompts: int = 0  # first tokens sampled
    failed: int = 0
    tokens: int = 0  # prompt tokens computed
    steps: int = 0
    step_seconds: float = 0.0


class Snapshot(NamedTuple):
    running: int
    waiting: int
    usage: Mapping[str, Usage]
    counters: LeaderCounters


@dataclass
class _Request:
    job: PrefillJob
    params: SamplingParams
    reply: Callable[[Outcome], None]
    attempt: int
    arrived: float
    unrouted: set[int]  # ranks that have no route to its destination yet
    started: float = 0.0


class PrefillLeader:
    """Requests in, outcomes out; every request is answered exactly once and forgotten on every rank then.

    `submit`, `cancel` and `stop` may be called by any thread. `run` is the engine thread and calls everything else.
    """

    def __init__(
        self,
        scheduler: PrefillScheduler,
        rank: PrefillRank,
        channel: TpLeader,
        *,
        tp_size: int,
        step_timeout_s: float,
    ) -> None:
        """`step_timeout_s`: how long the other ranks may need to finish a step."""
        self._scheduler, self._rank, self._channel = scheduler, rank, channel
        self._tp_size, self._step_timeout_s = tp_size, step_timeout_s
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._requests: dict[str, _Request] = {}
        self._attempts = itertools.count(1)
        self._done_ranks: dict[int, StepDone] = {}
        self._stopping = threading.Event()
        self._counters = LeaderCounters()  # replaced, never changed: any thread may read it

    def submit(
        self,
        job: PrefillJob,
        params: SamplingParams,
        destination: worker_pb2.Destination,
        reply: Callable[[Outcome], None],
    ) -> int:
        """Takes a request in; `reply` is called once, on the engine thread. Returns the attempt, for `cancel`."""
        command = OpenRoute(job.request_id, next(self._attempts), destination)
        self._inbox.put(lambda: self._submit(command, job, params, reply))
        return command.attempt

    def cancel(self, request_id: str, attempt: int) -> None:
        """The caller is gone: the request ends, if it has not. Another one of the same id is not touched."""
        self._inbox.put(lambda: self._cancel(request_id, attempt))

    def snapshot(self) -> Snapshot:
        """May be called by any thread; the numbers may be of two neighbouring moments."""
        scheduler = self._scheduler
        return Snapshot(scheduler.num_running, scheduler.num_waiting, scheduler.usage(), self._counters)

    def stop(self) -> None:
        """Ends `run` after the step under way."""
        self._stopping.set()
        self._inbox.put(lambda: None)

    def run(self) -> None:
        """Until `stop`. Whatever it raises is the end of this process; open requests are answered in any case."""
        try:
            while not self._stopping.is_set():
                self.run_once()
        finally:
            with contextlib.suppress(ChannelError):
                self._channel.broadcast(Stop())
            for request_id in list(self._requests):
                with contextlib.suppress(ChannelError):
                    self._end(request_id, PrefillFailure(FailureKind.STOPPED, "this prefill group is stopping"))

    def run_once(self) -> None:
        """Takes in what has arrived, then runs one step; sleeps a moment if there is nothing to do."""
        self._take_inbox()
        for rank, report in [*((0, report) for report in self._rank.poll()), *self._channel.reports()]:
            self._take_report(rank, report)
        for request_id, text in self._scheduler.expire(time.monotonic()).items():
            self._end(request_id, PrefillFailure(FailureKind.EXPIRED, text))
        plan = self._scheduler.schedule()
        if plan is None:
            self._sleep()
            return
        self._step(plan)

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _sleep(self) -> None:
        opening = any(request.unrouted for request in self._requests.values())
        try:
            self._inbox.get(timeout=_BUSY_POLL_S if opening else _IDLE_S)()
        except queue.Empty:
            return

    def _submit(
        self, command: OpenRoute, job: PrefillJob, params: SamplingParams, reply: Callable[[Outcome], None]
    ) -> None:
        try:
            self._scheduler.submit(job)
        except Refused as refused:
            self._count(failed=1)
            reply(PrefillFailure(refused.kind, str(refused)))
            return
        self._requests[job.request_id] = _Request(
            job, params, reply, command.attempt, time.monotonic(), unrouted=set(range(self._tp_size))
        )
        self._channel.broadcast(command)
        self._rank.open_route(command)

    def _cancel(self, request_id: str, attempt: int) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.attempt == attempt:
            self._end(request_id, PrefillFailure(FailureKind.STOPPED, f"request {request_id!r} was cancelled"))

    def _take_report(self, rank: int, report: Any) -> None:
        match report:
            case RouteOpened():
                self._take_route(rank, report)
            case RequestErrors(errors=errors):
                self._lose(errors)
            case StepDone():
                self._done_ranks[rank] = report
            case _:
                log.warning("rank %d reported %r, which nobody expects", rank, report)

    def _take_route(self, rank: int, report: RouteOpened) -> None:
        request = self._requests.get(report.request_id)
        if request is None or request.attempt != report.attempt:
            return  # it has ended meanwhile
        if report.error:
            self._lose({report.request_id: f"request {report.request_id!r}: rank {rank}: {report.error}"})
            return
        request.unrouted.discard(rank)
        if not request.unrouted:
            self._scheduler.set_routed(report.request_id)

    def _step(self, plan: StepPlan) -> None:
        started = time.monotonic()
        for chunk in plan.chunks:
            request = self._requests[chunk.request_id]
            request.started = request.started or started
        ending = [chunk.request_id for chunk in plan.chunks if chunk.is_last]
        plan = replace(plan, sampling={rid: self._requests[rid].params for rid in ending})
        self._done_ranks.clear()
        self._channel.broadcast(plan)
        result = self._rank.run(plan)
        errors = {**self._await_ranks(plan), **result.errors}
        wanted = {rid: params for rid, params in plan.sampling.items() if rid not in errors}
        first_tokens, unsampled = sample_first_tokens(result.ending, result.logits, wanted)
        ended = self._scheduler.complete(plan)
        seconds = time.monotonic() - started
        self._count(tokens=plan.num_tokens, steps=1, step_seconds=seconds)
        self._lose(errors)
        for request_id in ended:
            if done := self._requests.get(request_id):
                self._end(request_id, self._outcome(done, first_tokens.get(request_id), unsampled.get(request_id, "")))

    def _await_ranks(self, plan: StepPlan) -> Mapping[str, str]:
        """Errors of the other ranks, which finish together with this one. Raises RankLost."""
        deadline = time.monotonic() + self._step_timeout_s
        while len(self._done_ranks) < self._tp_size - 1:
            for rank, report in self._channel.reports():
                self._take_report(rank, report)
            if missing := set(range(1, self._tp_size)) - set(self._done_ranks):
                if time.monotonic() >= deadline:
                    raise RankLost(f"TP ranks {sorted(missing)} did not finish step {plan.number} in time")
                time.sleep(_BUSY_POLL_S)
        errors: dict[str, str] = {}
        for report in self._done_ranks.values():
            errors.update(report.errors)
        return errors

    def _outcome(self, request: _Request, token: Sampled | None, failure: str) -> Outcome:
        if token is None:
            return PrefillFailure(FailureKind.MODEL, failure)
        return PrefillResult(token, request.started - request.arrived, time.monotonic() - request.started)

    def _lose(self, errors: Mapping[str, str]) -> None:
        for request_id, text in errors.items():
            self._end(request_id, PrefillFailure(FailureKind.LOST, text))

    def _end(self, request_id: str, outcome: Outcome) -> None:
        """The one place where a request ends: freed here and on every rank, and answered. Idempotent."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._scheduler.cancel(request_id)
        self._rank.drop((request_id,))
        self._count(prompts=isinstance(outcome, PrefillResult), failed=isinstance(outcome, PrefillFailure))
        request.reply(outcome)
        self._channel.broadcast(Drop((request_id,)))

    def _count(self, **more: float) -> None:
        now = self._counters._asdict()
        self._counters = LeaderCounters(**{name: value + more.get(name, 0) for name, value in now.items()})
