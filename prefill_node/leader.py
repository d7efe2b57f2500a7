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
    PrefixFound,
    RequestErrors,
    RouteOpened,
    StartOver,
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
    cached_tokens: int = 0  # prompt tokens taken from the pool instead
    started_over: int = 0  # requests computed again because the pool did not return their rows
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
    asked: float = 0.0  # when the pool was asked for its prefix; 0 = not, or answered
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
        look_up_timeout_s: float = 5.0,
    ) -> None:
        """How long the other ranks may need to finish a step, and how long a request waits for the pool's look-up."""
        self._look_up_timeout_s = look_up_timeout_s
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
        self._look_up()
        plan = self._scheduler.schedule()
        for request_id, text in self._scheduler.stranded().items():
            self._end(request_id, PrefillFailure(FailureKind.LOST, text))
            plan = None  # it may be of this request; the next round makes another one
        if plan is None:
            self._sleep()
            return
        self._step(plan)

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _sleep(self) -> None:
        opening = any(request.unrouted or request.asked for request in self._requests.values())
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
            case PrefixFound():
                self._take_prefix(report)
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

    def _look_up(self) -> None:
        """Asks the pool for the prompts that come next; who waits too long for the answer goes on without it."""
        now = time.monotonic()
        for job in self._scheduler.to_look_up():
            request = self._requests[job.request_id]
            request.asked = now
            self._rank.look_up(job.request_id, job.keys, request.attempt)
        for request_id, request in self._requests.items():
            if request.asked and now - request.asked > self._look_up_timeout_s:
                request.asked = 0.0
                self._scheduler.set_prefix(request_id, None)

    def _take_prefix(self, report: PrefixFound) -> None:
        request = self._requests.get(report.request_id)
        if request is not None and request.attempt == report.attempt:
            request.asked = 0.0
            self._scheduler.set_prefix(report.request_id, report.blocks)

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
        others = self._await_ranks(plan)
        unloaded = dict(result.pool_errors)
        errors: dict[str, str] = dict(result.errors)
        for other in others:
            errors = {**other.errors, **errors}
            unloaded = {**other.pool_errors, **unloaded}
        self._rank.finish(plan, {*errors, *unloaded})
        lost = errors.keys() | unloaded.keys()
        wanted = {rid: params for rid, params in plan.sampling.items() if rid not in lost}
        first_tokens, unsampled = sample_first_tokens(result.ending, result.logits, wanted)
        cached = {chunk.request_id: self._scheduler.cached_tokens(chunk.request_id) for chunk in plan.chunks}
        restarted = self._start_over(plan, {key: text for key, text in unloaded.items() if key not in errors})
        ended = self._scheduler.complete(plan, started_over=restarted)
        seconds = time.monotonic() - started
        taken = sum(chunk.start for chunk in plan.chunks if chunk.takes_prefix and chunk.request_id not in restarted)
        self._count(tokens=plan.num_tokens, cached_tokens=taken, steps=1, step_seconds=seconds)
        self._lose({**{key: text for key, text in unloaded.items() if key not in restarted}, **errors})
        for request_id in ended:
            if done := self._requests.get(request_id):
                token, failure = first_tokens.get(request_id), unsampled.get(request_id, "")
                self._end(request_id, self._outcome(done, token, failure, cached[request_id]))

    def _start_over(self, plan: StepPlan, unloaded: Mapping[str, str]) -> set[str]:
        """Requests whose rows the pool did not return begin again without it; which ones do.

        Decode takes their blocks again, and forgets what it had of them (`ReadEntry.begun_again`), even that a rank has
        told it that its part is complete, as one may have done in a prompt's last step when another could not.
        """
        restarted = set()
        for chunk in plan.chunks:
            if chunk.request_id in unloaded and self._scheduler.start_over(chunk.request_id):
                restarted.add(chunk.request_id)
                log.warning("%s; it is computed again without the pool", unloaded[chunk.request_id])
        if restarted:
            self._rank.start_over(tuple(restarted))
            self._channel.broadcast(StartOver(tuple(restarted)))
            self._count(started_over=len(restarted))
        return restarted

    def _await_ranks(self, plan: StepPlan) -> list[StepDone]:
        """Reports of the other ranks, which finish together with this one. Raises RankLost."""
        deadline = time.monotonic() + self._step_timeout_s
        while len(self._done_ranks) < self._tp_size - 1:
            for rank, report in self._channel.reports():
                self._take_report(rank, report)
            if missing := set(range(1, self._tp_size)) - set(self._done_ranks):
                if time.monotonic() >= deadline:
                    raise RankLost(f"TP ranks {sorted(missing)} did not finish step {plan.number} in time")
                time.sleep(_BUSY_POLL_S)
        return list(self._done_ranks.values())

    def _outcome(self, request: _Request, token: Sampled | None, failure: str, cached_tokens: int) -> Outcome:
        if token is None:
            return PrefillFailure(FailureKind.MODEL, failure)
        started = request.started
        return PrefillResult(token, started - request.arrived, time.monotonic() - started, cached_tokens)

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
