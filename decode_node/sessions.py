"""The DecodeService: one stream per request, from admission to its last token. Runs on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from decode_node.commands import RankEndpoint
from decode_node.events import Delivered, Ended, Failure, FailureKind, GeneratedToken, Reserved
from decode_node.finish import FinishReason, FinishRules
from decode_node.inbox import Inbox
from decode_node.scheduler import DecodeRequest
from engine.messages import sampling_params, token_message
from engine.sampling_params import SamplingParams, SamplingParamsError

DECODE_SERVICE = "sluice.v1.DecodeService"
ADMIT_TIMEOUT_S = 10.0  # how long an open stream may keep silent
DRAIN_POLL_S = 0.02
FLUSH_S = 0.1  # from the end of a stream's handler until its status has reached the client

# UNAVAILABLE is not among them: it is what gRPC itself says of a broken connection, and so of a dead worker.
STATUS_CODES = {
    FailureKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    FailureKind.DUPLICATE: grpc.StatusCode.ALREADY_EXISTS,
    FailureKind.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FailureKind.TRANSFER: grpc.StatusCode.ABORTED,
    FailureKind.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    FailureKind.INTERNAL: grpc.StatusCode.INTERNAL,
    FailureKind.STOPPING: grpc.StatusCode.ABORTED,
}
FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: common_pb2.FINISH_REASON_ABORTED,
    FinishReason.PREEMPTED: common_pb2.FINISH_REASON_PREEMPTED,
}

SessionEvent = Reserved | Delivered | Ended
Requests = AsyncIterator[worker_pb2.DecodeSessionRequest]


@dataclass(frozen=True)
class SessionTerms:
    """What every request of this worker is told or bound by."""

    group: str
    dp_rank: int
    reservation_s: float
    request_timeout_s: float
    max_request_tokens: int
    eos_token_ids: frozenset[int]


class Session:
    """Carries one request's events from the engine thread to its stream."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[SessionEvent] = asyncio.Queue()

    def deliver(self, event: SessionEvent) -> None:
        """See `decode_node.leader.SessionSink`. An event for an event loop that has closed is dropped."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def next(self) -> SessionEvent:
        return await self._events.get()

    def next_now(self) -> SessionEvent | None:
        """An event that is already there."""
        return None if self._events.empty() else self._events.get_nowait()


class DecodeSessions(worker_pb2_grpc.DecodeServiceServicer):
    """Invariant (test_a_session_that_ends_frees_its_request): however a stream ends, its request ends with it."""

    def __init__(self, terms: SessionTerms) -> None:
        self._terms = terms
        self._inbox: Inbox | None = None
        self._endpoints: list[worker_pb2.ReadEndpoint] = []
        self._sessions: set[Session] = set()
        self._closed = False

    def open(self, inbox: Inbox, endpoints: Sequence[RankEndpoint]) -> None:
        """From now on requests are taken; `endpoints` in order of TP ranks."""
        self._endpoints = [
            worker_pb2.ReadEndpoint(tp_rank=rank, address=endpoint.address, epoch=endpoint.epoch)
            for rank, endpoint in enumerate(endpoints)
        ]
        self._inbox = inbox

    def close(self) -> None:
        """From now on requests are refused; those that are here go on (test_a_draining_worker_ends_what_it_has)."""
        self._closed = True

    async def drained(self, timeout_s: float) -> None:
        """Returns when every stream has ended and its end has left this process, after `timeout_s` seconds at most."""
        deadline = time.monotonic() + timeout_s
        if not self._sessions:
            return
        while self._sessions and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        await asyncio.sleep(FLUSH_S)

    async def DecodeSession(
        self, requests: Requests, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.DecodeSessionResponse]:
        inbox = self._inbox
        if inbox is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the decode worker is still loading")
        if self._closed:
            await context.abort(grpc.StatusCode.ABORTED, "the decode worker is stopping")
        admit = await self._admit(requests, context)
        request = self._request(admit, await self._sampling(admit, context))
        session, rid = Session(), request.request_id
        self._sessions.add(session)
        inbox.submit(request, session)
        reader = asyncio.create_task(self._forward_first_token(requests, rid, inbox, session))
        try:
            event: SessionEvent | None = await session.next()
            while not isinstance(event, Ended):
                if isinstance(event, Reserved):
                    yield worker_pb2.DecodeSessionResponse(destination=self._destination(event))
                    event = await session.next()
                    continue
                tokens = []
                while isinstance(event, Delivered):  # what has gathered goes in one message
                    tokens.append(token_message(event.token.id, event.token.logprob, event.token.top))
                    event = session.next_now()
                yield worker_pb2.DecodeSessionResponse(tokens=worker_pb2.GeneratedTokens(tokens=tokens))
                event = event or await session.next()
            if isinstance(event.outcome, Failure):
                await context.abort(STATUS_CODES[event.outcome.kind], event.outcome.text)
            finished = worker_pb2.Finished(reason=FINISH_REASONS[event.outcome])
            yield worker_pb2.DecodeSessionResponse(finished=finished)
        finally:
            reader.cancel()
            inbox.cancel(rid, session)
            self._sessions.discard(session)

    async def _admit(self, requests: Requests, context: grpc.aio.ServicerContext[Any, Any]) -> worker_pb2.Admit:
        try:
            first = await asyncio.wait_for(anext(requests), ADMIT_TIMEOUT_S)
        except (TimeoutError, StopAsyncIteration):
            await _refuse(context, "a decode session must begin with admit, but nothing came")
        if first.WhichOneof("command") != "admit":
            await _refuse(context, f"a decode session must begin with admit, not {first.WhichOneof('command')}")
        if not first.admit.request_id:
            await _refuse(context, "admit.request_id is empty")
        return first.admit

    async def _sampling(self, admit: worker_pb2.Admit, context: grpc.aio.ServicerContext[Any, Any]) -> SamplingParams:
        try:
            return sampling_params(admit.sampling)
        except SamplingParamsError as error:
            await _refuse(context, f"request {admit.request_id}: sampling.{error}")

    def _request(self, admit: worker_pb2.Admit, sampling: SamplingParams) -> DecodeRequest:
        terms = self._terms
        return DecodeRequest(
            request_id=admit.request_id,
            prompt_tokens=len(admit.prompt),
            rules=FinishRules(sampling, terms.eos_token_ids, terms.max_request_tokens),
            deadline=time.monotonic() + terms.request_timeout_s,
            resumed=admit.resumed,
        )

    async def _forward_first_token(self, requests: Requests, request_id: str, inbox: Inbox, session: Session) -> None:
        """Hands prefill's token on. A stream that brings anything else, or nothing, ends with an error."""
        command = await anext(requests, None)
        if command is not None and command.WhichOneof("command") == "prefilled":
            first = command.prefilled.first_token
            logprob = first.logprob if first.HasField("logprob") else None
            top = tuple((item.token_id, item.logprob) for item in first.top)
            inbox.first_token(request_id, GeneratedToken(first.id, logprob, top))
            return
        what = "it was closed" if command is None else f"{command.WhichOneof('command')} came"
        text = f"request {request_id}: after admit the session must bring prefilled, but {what}"
        session.deliver(Ended(request_id, Failure(FailureKind.INVALID, text)))

    def _destination(self, reserved: Reserved) -> worker_pb2.Destination:
        return worker_pb2.Destination(
            request_id=reserved.request_id,
            group=self._terms.group,
            dp_rank=self._terms.dp_rank,
            tp_size=len(self._endpoints),
            endpoints=self._endpoints,
            generation=reserved.generation,
            lease_ms=int(self._terms.reservation_s * 1000),
        )


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], text: str) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
