"""The PrefillService of TP rank 0: one call per prompt. Runs on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc
from sluice.v1 import worker_pb2, worker_pb2_grpc

from engine.messages import sampling_params, token_message
from engine.sampling_params import SamplingParams, SamplingParamsError
from prefill_node.leader import PrefillLeader
from prefill_node.outcome import FailureKind, Outcome, PrefillFailure
from prefill_node.scheduler import PrefillJob

PREFILL_SERVICE = "sluice.v1.PrefillService"
Context = grpc.aio.ServicerContext[Any, Any]

STATUS_CODES = {
    FailureKind.TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    FailureKind.DUPLICATE: grpc.StatusCode.ALREADY_EXISTS,
    FailureKind.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FailureKind.EXPIRED: grpc.StatusCode.DEADLINE_EXCEEDED,
    FailureKind.LOST: grpc.StatusCode.UNAVAILABLE,
    FailureKind.MODEL: grpc.StatusCode.INTERNAL,
    FailureKind.STOPPED: grpc.StatusCode.UNAVAILABLE,
}


class PrefillCalls(worker_pb2_grpc.PrefillServiceServicer):
    """Invariant (test_a_call_that_ends_early_cancels_its_request): no request outlives its call."""

    def __init__(
        self, vocab_size: int, request_timeout_s: float, keys: Callable[[Sequence[int]], tuple[str, ...]]
    ) -> None:
        """`keys` names a prompt's blocks in the pool."""
        self._vocab_size, self._keys = vocab_size, keys
        self._request_timeout_s = request_timeout_s
        self._leader: PrefillLeader | None = None
        self._closed = False
        self._open_calls = 0

    def open(self, leader: PrefillLeader) -> None:
        """From now on requests are taken."""
        self._leader = leader

    def close(self) -> None:
        """From now on requests are refused; those that are here go on (test_a_draining_worker_ends_what_it_has)."""
        self._closed = True

    @property
    def open_calls(self) -> int:
        """Requests that have not been answered."""
        return self._open_calls

    async def Prefill(self, request: worker_pb2.PrefillRequest, context: Context) -> worker_pb2.PrefillResponse:
        leader = self._leader
        if leader is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the prefill worker is still loading")
        if self._closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the prefill worker is stopping")
        params = await self._check(request, context)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Outcome] = loop.create_future()

        def settle(outcome: Outcome) -> None:
            if not answer.done():
                answer.set_result(outcome)

        def reply(outcome: Outcome) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has closed: nobody waits any more
                loop.call_soon_threadsafe(settle, outcome)

        attempt = leader.submit(self._job(request, context), params, request.destination, reply)
        self._open_calls += 1
        try:
            outcome = await answer
        except asyncio.CancelledError:
            leader.cancel(request.request_id, attempt)
            raise
        finally:
            self._open_calls -= 1
        if isinstance(outcome, PrefillFailure):
            await context.abort(STATUS_CODES[outcome.kind], outcome.text)
        token = outcome.first_token
        return worker_pb2.PrefillResponse(
            first_token=token_message(token.token, token.logprob, token.top_logprobs),
            cached_tokens=outcome.cached_tokens,
            queue_seconds=outcome.queue_seconds,
            compute_seconds=outcome.compute_seconds,
        )

    async def _check(self, request: worker_pb2.PrefillRequest, context: Context) -> SamplingParams:
        if not request.request_id:
            await _refuse(context, "request_id is empty")
        if not request.prompt:
            await _refuse(context, f"request {request.request_id!r}: prompt is empty")
        if (highest := max(request.prompt)) >= self._vocab_size:
            await _refuse(
                context, f"request {request.request_id!r}: prompt: token {highest} is not below {self._vocab_size}"
            )
        if request.destination.request_id != request.request_id:
            await _refuse(
                context,
                f"request {request.request_id!r}: destination.request_id is {request.destination.request_id!r}; "
                f"it must be the same",
            )
        try:
            return sampling_params(request.sampling)
        except SamplingParamsError as error:
            await _refuse(context, f"request {request.request_id!r}: sampling.{error}")

    def _job(self, request: worker_pb2.PrefillRequest, context: Context) -> PrefillJob:
        now = time.monotonic()
        remaining = context.time_remaining()
        lease_s = request.destination.lease_ms / 1000 or math.inf
        return PrefillJob(
            request_id=request.request_id,
            prompt=tuple(request.prompt),
            deadline=now + min(self._request_timeout_s, math.inf if remaining is None else remaining),
            start_by=now + lease_s,
            resumed=request.resumed,
            keys=self._keys(request.prompt),
        )


async def _refuse(context: Context, text: str) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
