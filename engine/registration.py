"""A worker's ties to the meta servers: registration, heartbeats, leaving."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from sluice.v1 import common_pb2, registry_pb2, registry_pb2_grpc

from engine.trust import PLAIN, Trust

log = logging.getLogger(__name__)
_RPC_S = 5.0
_FAREWELL_S = 1.0
_RETRY_S = 0.5  # between tries to register
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # a meta server that is back is heard of soon
)


@dataclass(frozen=True)
class Member:
    """Who registers. `status` is called on the event loop and must not block; `on_refused` is told when a meta server
    will never take this worker, with its reason."""

    info: registry_pb2.WorkerInfo
    status: Callable[[], common_pb2.WorkerStatus]
    on_refused: Callable[[str], None]
    heartbeat_s: float


class Registration:
    """Keeps one worker registered at every meta server behind a name.

    Normally that is one. While a meta server is replaced, the old one ends its requests and the new one already takes
    others, so both must know the worker (test_a_worker_registers_at_every_meta_server_behind_the_name). The name is
    looked up again with every heartbeat; while nobody knows it, the earlier addresses stay.
    """

    def __init__(self, host: str, port: int, member: Member, trust: Trust = PLAIN) -> None:
        self._host, self._port, self._member, self._trust = host, port, member, trust
        self._links: dict[str, _Link] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._follow_the_name(), name="registration")

    async def tell(self) -> None:
        """Sends the worker's status now, without waiting for the next heartbeat. Takes a second at most."""
        await asyncio.gather(*(link.tell() for link in self._links.values()))

    async def leave(self) -> None:
        """Ends the heartbeats and leaves every registry. Takes about a second at most. Idempotent."""
        if self._task is not None:
            await _ended(self._task)
        links = list(self._links.values())
        self._links.clear()
        await asyncio.gather(*(link.leave() for link in links))

    async def _follow_the_name(self) -> None:
        while True:
            if addresses := await self._look_up():
                for address in addresses - self._links.keys():
                    self._links[address] = _Link(address, self._member, self._trust)
                for address in self._links.keys() - addresses:
                    await self._links.pop(address).close()
            await asyncio.sleep(self._member.heartbeat_s)

    async def _look_up(self) -> set[str]:
        """host:port of each meta server; an empty set when nobody knows the name now."""
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(self._host)
            return {f"{self._host}:{self._port}"}
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, family=socket.AF_INET, type=socket.SOCK_STREAM)
        except OSError as error:
            name = self._member.info.worker_id
            log.warning("%s: grpc.host = %s: no meta server has this name: %s", name, self._host, error)
            return set()
        return {f"{host}:{self._port}" for host in {str(address[0]) for *_, address in found}}


class _Link:
    """The ties to one meta server. A task of its own, so that one which does not answer delays no other."""

    def __init__(self, address: str, member: Member, trust: Trust) -> None:
        self._member, self._trust, self._metadata = member, trust, trust.metadata
        self._registered = False
        self._channel = trust.aio_channel(address, _CHANNEL_OPTIONS)
        self._stub: registry_pb2_grpc.RegistryServiceAsyncStub = registry_pb2_grpc.RegistryServiceStub(self._channel)
        self._task = asyncio.create_task(self._stay_registered(), name=f"heartbeats to {address}")

    async def tell(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._beat(_FAREWELL_S)

    async def leave(self) -> None:
        await _ended(self._task)
        info = self._member.info
        with contextlib.suppress(grpc.aio.AioRpcError):
            request = registry_pb2.LeaveRequest(worker_id=info.worker_id, epoch=info.epoch)
            await self._stub.Leave(request, timeout=_FAREWELL_S, metadata=self._metadata)
        await self._channel.close(None)

    async def close(self) -> None:
        """For a meta server that is gone."""
        await _ended(self._task)
        await self._channel.close(None)

    async def _stay_registered(self) -> None:
        member = self._member
        name, period = member.info.worker_id, member.heartbeat_s
        while True:
            try:
                if not self._registered:
                    request = registry_pb2.RegisterRequest(info=member.info)
                    await self._stub.Register(request, timeout=_RPC_S, metadata=self._metadata)
                    self._registered = True
                await self._beat(_RPC_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    member.on_refused(f"the meta server refuses this worker: {error.details()}")
                    return
                details = error.details() or ""
                refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
                problem = "refuses its key (security.worker_keys)" if refused else "does not answer"
                log.warning("%s: the meta server %s: %s", name, problem, self._trust.failure(details) or details)
            await asyncio.sleep(period if self._registered else min(period, _RETRY_S))

    async def _beat(self, timeout_s: float) -> None:
        info = self._member.info
        beat = registry_pb2.HeartbeatRequest(worker_id=info.worker_id, epoch=info.epoch, status=self._member.status())
        self._registered = (await self._stub.Heartbeat(beat, timeout=timeout_s, metadata=self._metadata)).known


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
