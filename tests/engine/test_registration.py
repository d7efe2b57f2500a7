"""A worker's ties to one meta server or several."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from sluice.v1 import common_pb2, registry_pb2, registry_pb2_grpc

from engine.credentials import Credentials
from engine.ports import free_port
from engine.registration import Member, Registration
from engine.security_section import SecuritySection
from engine.trust import Trust
from tests.engine.test_worker import Registry

NAME = "sluice-meta.example"


@asynccontextmanager
async def listening(registry: Registry, address: str) -> AsyncIterator[None]:
    server = grpc.aio.server()
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
    assert server.add_insecure_port(address)
    await server.start()
    yield
    await server.stop(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses behind NAME; empty = nobody knows it."""
    addresses: list[str] = []

    def look_up(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        assert host == NAME
        if not addresses:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return addresses


def run(body: Callable[[Registration, common_pb2.WorkerStatus, int], Awaitable[None]], heartbeat_s: float) -> None:
    async def main() -> None:
        status = common_pb2.WorkerStatus(ready=True)
        info = registry_pb2.WorkerInfo(worker_id="decode-0/dp0/tp0", epoch="e1")
        member = Member(info, lambda: status, pytest.fail, heartbeat_s)
        port = free_port("127.0.0.1")
        registration = Registration(NAME, port, member)
        try:
            await body(registration, status, port)
        finally:
            await registration.leave()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_worker_registers_at_every_meta_server_behind_the_name(behind: list[str]) -> None:
    """While a meta server is being replaced, the old one and the new one both know the worker."""

    async def body(registration: Registration, _: common_pb2.WorkerStatus, port: int) -> None:
        old, new = Registry(), Registry()
        registration.start()
        await asyncio.sleep(0.1)  # nobody is there yet
        async with listening(old, f"127.0.0.1:{port}"):
            behind.append("127.0.0.1")
            await until(lambda: len(old.beats) > 1)
            async with listening(new, f"127.0.0.2:{port}"):
                behind.append("127.0.0.2")
                await until(lambda: len(new.beats) > 1)
                seen = len(old.beats)
                await until(lambda: len(old.beats) > seen)
                behind.remove("127.0.0.1")
                await asyncio.sleep(0.3)
                seen = len(old.beats)
                before = len(new.beats)
                await until(lambda: len(new.beats) > before + 2)
                assert len(old.beats) == seen, "it goes on telling a server that nobody names"
                behind.clear()  # a name that is not known for a moment ends nothing
                before = len(new.beats)
                await until(lambda: len(new.beats) > before + 2)
                await registration.leave()
        assert (old.left, new.left) == ([], ["decode-0/dp0/tp0"])

    run(body, heartbeat_s=0.05)


def test_what_must_be_known_at_once_does_not_wait_for_the_next_heartbeat(behind: list[str]) -> None:
    async def body(registration: Registration, status: common_pb2.WorkerStatus, port: int) -> None:
        registry = Registry()
        async with listening(registry, f"127.0.0.1:{port}"):
            behind.append("127.0.0.1")
            registration.start()
            await until(lambda: len(registry.beats) == 1)
            status.ready = False
            await registration.tell()
            assert [beat.ready for beat in registry.beats] == [True, False]
            await registration.leave()

    run(body, heartbeat_s=20.0)


def test_a_worker_with_a_wrong_key_says_so_and_goes_on_trying(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_TEST_KEY", "right")
    credentials = Credentials.of(SecuritySection(worker_keys="env:SLUICE_TEST_KEY"))

    async def main() -> None:
        registry = Registry()
        server = grpc.aio.server(interceptors=credentials.interceptors)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
        port = credentials.listen(server, "127.0.0.1:0")
        await server.start()
        info = registry_pb2.WorkerInfo(worker_id="decode-0/dp0/tp0", epoch="e1")
        member = Member(info, common_pb2.WorkerStatus, pytest.fail, 0.05)
        wrong = Registration("127.0.0.1", port, member, Trust(key="wrong"))
        right = Registration("127.0.0.1", port, member, credentials.as_worker)
        wrong.start()
        await until(lambda: caplog.text.count("refuses its key (security.worker_keys): the key in the header") > 1)
        assert not registry.registered
        right.start()
        await until(lambda: len(registry.beats) > 1)
        await wrong.leave()
        await right.leave()
        await server.stop(0)
        assert registry.left == ["decode-0/dp0/tp0"]

    asyncio.run(asyncio.wait_for(main(), 30))
