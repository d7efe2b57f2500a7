"""One run of a request, on one decode replica and one prefill replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager

from sluice.v1 import common_pb2, worker_pb2

from meta_server.channels import WorkerChannels
from meta_server.decode_session import DecodeSession
from meta_server.errors import unavailable
from meta_server.prefill_call import call_prefill
from meta_server.registry import Registry, Replica
from meta_server.request import GenerationRequest
from meta_server.router import Router


class Attempt:
    """Decode reserves -> prefill runs -> tokens are relayed -> everything is closed.

    Invariants:
        * After `run` nothing is held for it: claims and RPCs are closed (test_accounting_returns_to_zero).
        * The loss of any rank of its replicas ends it, and it alone (test_a_lost_decode_worker_is_replaced).
    """

    def __init__(
        self,
        request: GenerationRequest,
        deliver: Callable[[Sequence[common_pb2.Token]], bool],
        *,
        registry: Registry,
        router: Router,
        channels: WorkerChannels,
        avoid: Set[str],
        timeout_s: float,
    ) -> None:
        """`deliver` takes tokens as they come and says whether they were enough. `avoid`: epochs of leaders whose
        replicas are taken only if there is no other one. `timeout_s` is the deadline of the RPCs."""
        self.request = request
        self.stage = "being admitted"
        self.used: set[str] = set()  # epochs of the leaders of the replicas it ran on
        self.cached_tokens: int | None = None  # told when prefill has ended
        self._deliver = deliver
        self._registry = registry
        self._router = router
        self._channels = channels
        self._avoid = avoid
        self._timeout_s = timeout_s
        self._lost: str | None = None
        self._work: asyncio.Task[common_pb2.FinishReason.ValueType] | None = None

    async def run(self) -> common_pb2.FinishReason.ValueType:
        """Once. Returns why the answer is complete.

        Raises RequestFailed, with kind UNAVAILABLE if it was not the request's own fault, and Preempted.
        """
        self._work = asyncio.create_task(self._serve(), name=f"run {self.request.wire_id}")
        try:
            return await self._work
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._lost is None or (current is not None and current.cancelling()):
                raise
            raise unavailable(self._lost) from None

    async def _serve(self) -> common_pb2.FinishReason.ValueType:
        request = self.request
        with self._router.claim_decode(request.total_tokens, self._avoid) as decode, self._watched(decode):
            name = decode.leader.info.worker_id
            async with DecodeSession(self._channels, decode.leader, request, self._timeout_s) as session:
                self.stage = f"waiting for room on decode worker {name}"
                destination = await session.admit()
                await session.start(await self._prefill(session, destination))
                self.stage = f"being decoded by {name}"
                return await self._relay(session)

    async def _prefill(self, session: DecodeSession, destination: worker_pb2.Destination) -> common_pb2.Token:
        """Runs prefill while watching the decode session: whichever breaks first ends the other."""
        with self._router.claim_prefill(len(self.request.prompt), self._avoid) as prefill, self._watched(prefill):
            worker = prefill.leader
            self.stage = f"being prefilled by {worker.info.worker_id}"
            call = asyncio.create_task(call_prefill(self._channels, worker, self.request, destination, self._timeout_s))
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
        self.cached_tokens = response.cached_tokens
        return response.first_token

    async def _relay(self, session: DecodeSession) -> common_pb2.FinishReason.ValueType:
        while True:
            event = await session.tokens()
            if isinstance(event, int):
                return event
            if self._deliver(event):
                return common_pb2.FINISH_REASON_STOP

    @contextmanager
    def _watched(self, replica: Replica) -> Iterator[None]:
        """The loss of any rank of `replica` ends this run."""
        self.used.add(replica.leader.info.epoch)

        def on_lost(text: str) -> None:
            if self._lost is None and self._work is not None:
                self._lost = text
                self._work.cancel()

        unwatch = self._registry.watch(replica, on_lost)
        try:
            yield
        finally:
            unwatch()
