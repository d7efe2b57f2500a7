"""One request, from admission to its last token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sluice.v1 import client_pb2, common_pb2, worker_pb2

from meta_server.channels import WorkerChannels
from meta_server.decode_session import DecodeSession
from meta_server.errors import Failure, FailureKind, RequestFailed, unavailable
from meta_server.output import OutputText
from meta_server.prefill_call import call_prefill
from meta_server.registry import Registry, Replica
from meta_server.request import Done, Event, Final, GenerationRequest
from meta_server.router import Router

log = logging.getLogger(__name__)
_RPC_SLACK_S = 5.0


class Generation:
    """Runs one request: decode reserves -> prefill runs -> tokens are relayed -> everything is closed.

    Invariants:
        * `emit` gets exactly one final event (Done or Failure), and it is the last (test_exactly_one_final_event).
        * When it is emitted, the request holds nothing here: claims and RPCs are closed, its id is free
          (test_accounting_returns_to_zero).
        * Whatever interrupts it (client, lost worker, deadline, shutdown) goes through `abort`; the first one wins.
    """

    def __init__(
        self,
        request: GenerationRequest,
        output: OutputText,
        emit: Callable[[Event], None],
        *,
        registry: Registry,
        router: Router,
        channels: WorkerChannels,
        deadline_s: float,
    ) -> None:
        self.request = request
        self._output = output
        self._emit = emit
        self._registry = registry
        self._router = router
        self._channels = channels
        self._deadline_s = deadline_s
        self._born = time.monotonic()
        self._first_token: float | None = None
        self._last_token = self._born
        self._cached_tokens = 0
        self._stage = "being admitted"
        self._interrupted: Final | None = None
        self._running = False
        self._task: asyncio.Task[None] | None = None

    def start(self, on_end: Callable[[Final], None]) -> None:
        """Begins to run. `on_end` is called just before the final event is emitted."""
        self._task = asyncio.create_task(self._run(on_end), name=f"request {self.request.request_id}")

    def abort(self, final: Final | None = None) -> None:
        """Ends the request early with `final` (as cancelled by the client if absent). No effect after the end."""
        if self._task is not None and self._interrupted is None and not self._task.done():
            self._interrupted = final or Done(common_pb2.FINISH_REASON_ABORTED, self._usage())
            if self._running:  # a task cancelled before its first step would never emit its final event
                self._task.cancel()

    async def closed(self) -> None:
        """Waits until the request has ended."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _run(self, on_end: Callable[[Final], None]) -> None:
        self._running = True
        timer = asyncio.get_running_loop().call_later(self._deadline_s, self._expire)
        final: Final
        try:
            final = self._interrupted or await self._serve()
        except RequestFailed as error:
            failure = error.failure
            final = Failure(failure.kind, f"request {self.request.request_id}: {failure.message}", failure.param)
        except asyncio.CancelledError:
            final = self._interrupted or Done(common_pb2.FINISH_REASON_ABORTED, self._usage())
        except Exception as error:
            log.exception("request %s failed", self.request.request_id)
            final = Failure(FailureKind.INTERNAL, f"request {self.request.request_id}: {type(error).__name__}: {error}")
        timer.cancel()
        on_end(final)
        self._emit(final)

    async def _serve(self) -> Done:
        request = self.request
        with self._router.claim_decode(request.total_tokens) as decode, self._watched(decode):
            name = decode.leader.info.worker_id
            async with DecodeSession(self._channels, decode.leader, request, self._rpc_timeout()) as session:
                self._stage = f"waiting for room on decode worker {name}"
                destination = await session.admit()
                await session.start(await self._prefill(session, destination))
                self._stage = f"being decoded by {name}"
                return await self._relay(session, name)

    async def _prefill(self, session: DecodeSession, destination: worker_pb2.Destination) -> common_pb2.Token:
        """Runs prefill while watching the decode session: whichever breaks first ends the other."""
        with self._router.claim_prefill(len(self.request.prompt)) as prefill, self._watched(prefill):
            worker = prefill.leader
            self._stage = f"being prefilled by {worker.info.worker_id}"
            call = asyncio.create_task(
                call_prefill(self._channels, worker, self.request, destination, self._rpc_timeout())
            )
            broken = asyncio.create_task(session.broken())
            try:
                await asyncio.wait({call, broken}, return_when=asyncio.FIRST_COMPLETED)
                if broken.done():
                    raise broken.result()
                response = call.result()
            finally:
                call.cancel()
                broken.cancel()
                await asyncio.wait({call, broken})
        self._cached_tokens = response.cached_tokens
        return response.first_token

    async def _relay(self, session: DecodeSession, name: str) -> Done:
        while True:
            event = await session.next()
            match event.WhichOneof("event"):
                case "tokens":
                    self._last_token = time.monotonic()
                    self._first_token = self._first_token or self._last_token
                    self._emit(self._output.push(event.tokens.tokens))
                    if self._output.stopped:
                        return self._done(common_pb2.FINISH_REASON_STOP)
                case "finished" if event.finished.reason in (
                    common_pb2.FINISH_REASON_STOP,
                    common_pb2.FINISH_REASON_LENGTH,
                ):
                    return self._done(event.finished.reason)
                case _:
                    raise unavailable(f"decode worker {name} ended the request early: {str(event).strip()!r}")

    def _done(self, reason: common_pb2.FinishReason.ValueType) -> Done:
        text = self._output.finish(reason)
        if self._output.stopped or self._output.stop_reason is not None:
            reason = common_pb2.FINISH_REASON_STOP
        return Done(reason, self._usage(), text, self._output.stop_reason)

    def _usage(self) -> client_pb2.Usage:
        started = self._first_token
        return client_pb2.Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self._output.count,
            cached_tokens=self._cached_tokens,
            ttft_seconds=0.0 if started is None else started - self._born,
            decode_seconds=0.0 if started is None else self._last_token - started,
        )

    def _rpc_timeout(self) -> float:
        """Workers' deadlines lie behind our own, whose message tells more; they matter when this process is gone."""
        return max(0.0, self._born + self._deadline_s - time.monotonic()) + _RPC_SLACK_S

    def _expire(self) -> None:
        self.abort(
            Failure(
                FailureKind.DEADLINE,
                f"request {self.request.request_id} did not end within {self._deadline_s:g} s "
                f"(runtime.request_timeout_s); it was {self._stage}",
            )
        )

    @contextmanager
    def _watched(self, replica: Replica) -> Iterator[None]:
        """The loss of any rank of `replica` ends the request."""

        def on_lost(text: str) -> None:
            self.abort(Failure(FailureKind.UNAVAILABLE, f"request {self.request.request_id}: {text}"))

        unwatch = self._registry.watch(replica, on_lost)
        try:
            yield
        finally:
            unwatch()
