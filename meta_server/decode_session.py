"""The meta server's end of a DecodeSession: one request on one decode worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType

import grpc
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from meta_server.channels import WorkerChannels
from meta_server.errors import RequestFailed, unavailable
from meta_server.registry import Worker
from meta_server.request import GenerationRequest
from meta_server.worker_failure import explain

_CLOSE_S = 2.0  # how long a worker gets to end a stream on which it has sent Finished


_GOOD_ENDS = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


class Preempted(Exception):
    """Decode gave the request up, for its memory or because it stops; what is left of it may be run at once.

    By the same worker too: one that stops has said so, and is not chosen again.
    """


class DecodeSession:
    """Opens on entering, ends on leaving; what decode holds for the request ends with it.

    Invariant: after leaving, the RPC is over on this side, whatever happened (test_accounting_returns_to_zero).
    Every method raises RequestFailed, naming the worker and the cause, when the stream breaks.
    """

    def __init__(self, channels: WorkerChannels, worker: Worker, request: GenerationRequest, timeout_s: float) -> None:
        self._channels = channels
        self._worker = worker
        self._request = request
        self._timeout_s = timeout_s
        self._pending: asyncio.Future[worker_pb2.DecodeSessionResponse] | None = None
        self._finished = False

    async def __aenter__(self) -> DecodeSession:
        stub: worker_pb2_grpc.DecodeServiceAsyncStub
        stub = worker_pb2_grpc.DecodeServiceStub(self._channels.get(self._worker))
        metadata = self._channels.metadata
        self._call = stub.DecodeSession(timeout=self._timeout_s, metadata=metadata)  # type: ignore[call-arg]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._finished:
                with contextlib.suppress(TimeoutError, asyncio.InvalidStateError, grpc.RpcError):
                    async with asyncio.timeout(_CLOSE_S):
                        await self._call.done_writing()
                        await self._call.code()
        finally:
            self._call.cancel()
            if self._pending is not None:
                await asyncio.wait({self._pending})
                if not self._pending.cancelled():
                    self._pending.exception()

    async def admit(self) -> worker_pb2.Destination:
        """Asks decode for the request's blocks; returns once they are reserved, which may take as long as a queue."""
        request = self._request
        admit = worker_pb2.Admit(
            request_id=request.wire_id,
            prompt=request.prompt,
            sampling=request.sampling_message(),
            resumed=request.resumed,
        )
        await self._write(worker_pb2.DecodeSessionRequest(admit=admit))
        event = await self.next()
        self._check_preempted(event)
        if event.WhichOneof("event") != "destination":
            raise self._out_of_order(event, "a destination")
        return event.destination

    async def start(self, first_token: common_pb2.Token) -> None:
        """Tells decode that prefill is done; its tokens, the first one included, follow."""
        prefilled = worker_pb2.Prefilled(first_token=first_token)
        await self._write(worker_pb2.DecodeSessionRequest(prefilled=prefilled))

    async def next(self) -> worker_pb2.DecodeSessionResponse:
        """The next event. Cancelling the wait loses no event."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._read())
        event = await asyncio.shield(self._pending)
        self._pending = None
        self._finished = event.WhichOneof("event") == "finished"
        return event

    async def broken(self) -> RequestFailed | Preempted:
        """Waits, between destination and prefilled, until the session breaks; returns why.

        Only an end is legal there, so a token is a failure too. Cancelling the wait changes nothing.
        """
        try:
            event = await self.next()
            self._check_preempted(event)
        except (RequestFailed, Preempted) as failure:
            return failure
        return self._out_of_order(event, "nothing before prefill is done")

    async def tokens(self) -> Sequence[common_pb2.Token] | common_pb2.FinishReason.ValueType:
        """After `start`: the next tokens, or why decode has finished. Raises Preempted too."""
        event = await self.next()
        self._check_preempted(event)
        match event.WhichOneof("event"):
            case "tokens":
                return event.tokens.tokens
            case "finished" if event.finished.reason in _GOOD_ENDS:
                return event.finished.reason
            case _:
                raise self._out_of_order(event, "tokens or their end")

    async def _read(self) -> worker_pb2.DecodeSessionResponse:
        try:
            event = await self._call.read()
        except (grpc.RpcError, asyncio.InvalidStateError):
            raise await self._ended() from None
        if isinstance(event, worker_pb2.DecodeSessionResponse):
            return event
        raise await self._ended()

    async def _write(self, message: worker_pb2.DecodeSessionRequest) -> None:
        try:
            await self._call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            raise await self._ended() from None

    async def _ended(self) -> RequestFailed:
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            return unavailable(f"decode worker {self._worker.info.worker_id} ended the request without finishing it")
        return await explain(self._channels, self._worker, "decode", code, details or "")

    def _check_preempted(self, event: worker_pb2.DecodeSessionResponse) -> None:
        if event.WhichOneof("event") == "finished" and event.finished.reason == common_pb2.FINISH_REASON_PREEMPTED:
            raise Preempted(f"decode worker {self._worker.info.worker_id} gave it up: it needs the memory, or stops")

    def _out_of_order(self, event: worker_pb2.DecodeSessionResponse, expected: str) -> RequestFailed:
        sent = str(event).strip()
        return unavailable(f"decode worker {self._worker.info.worker_id} sent {sent!r}, expected {expected}")
