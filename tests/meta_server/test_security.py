"""TLS and keys at the meta server's two doors: what gets in, and what everybody else is told."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sluice.v1 import client_pb2, client_pb2_grpc, registry_pb2, registry_pb2_grpc

from deploy import probe
from deploy.client import Client, ClientError
from engine.config import SluiceConfig, build_config
from engine.credentials import Credentials, client_trust
from engine.trust import Trust
from meta_server.server import MetaServer
from tests.certificates import DAY, NAME, Authority, section
from tests.meta_server.deployment import MODEL_DIR

pytestmark = pytest.mark.anyio
WORKER = registry_pb2.HeartbeatRequest(worker_id="decode-0/dp0/tp0", epoch="1")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("security"))


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, object]:
    (tmp_path / "api").write_text("client-1\nclient-2\n")
    (tmp_path / "worker").write_text("worker-1\n")
    return {"api_keys": tmp_path / "api", "worker_keys": tmp_path / "worker"}


def configured(security: dict[str, object]) -> SluiceConfig:
    model = {"path": str(MODEL_DIR), "name": "passkey"}
    return build_config({"model": model, "http": {"port": 0}, "grpc": {"port": 0}, "security": security})


@asynccontextmanager
async def serving(config: SluiceConfig) -> AsyncIterator[MetaServer]:
    server = MetaServer(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def http_of(server: MetaServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=20)


async def status_code(trust: Trust, port: int) -> grpc.StatusCode:
    """How GetStatus ends."""
    async with trust.aio_channel(f"127.0.0.1:{port}") as channel:
        stub = client_pb2_grpc.SluiceServiceStub(channel)
        try:
            await stub.GetStatus(client_pb2.GetStatusRequest(), timeout=20, metadata=trust.metadata)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_nothing_is_served_without_a_key(authority: Authority, keys: dict[str, object]) -> None:
    """Over TLS: 401 as OpenAI answers it, UNAUTHENTICATED over gRPC; a client's key opens the client API alone."""
    config = configured(section(authority, authority.issue("keyed"), **keys))
    async with serving(config) as server:
        context = ssl.create_default_context(cafile=str(authority.file))
        async with httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{server.http_port}", verify=context, timeout=20
        ) as http:
            for path in ("/v1/completions", "/v1/chat/completions"):
                assert (await http.post(path, json={"prompt": [5]})).status_code == 401
            for header in ({}, {"Authorization": "Bearer client-3"}, {"Authorization": "Bearer worker-1"}):
                answer = await http.get("/v1/models", headers=header)
                error = answer.json()["error"]
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert "Authorization" in error["message"] and "client-3" not in error["message"]
            for key in ("client-1", "client-2"):
                assert (await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code == 200
            assert (await http.get("/health")).status_code == 503, "no key is asked for, and no group is ready"
            assert (await http.get("/metrics")).status_code == 200
        ours, client = Credentials.of(config.security), client_trust(config.security)
        ok, refused = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED
        for trust, code in ((client, ok), (ours.as_worker, refused), (Trust(client.ca), refused)):
            assert await status_code(trust, server.grpc_port) is code
        async with client.aio_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(), timeout=20)
            registry = registry_pb2_grpc.RegistryServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="not a valid one") as caught:
                await registry.Heartbeat(WORKER, timeout=20, metadata=client.metadata)
            assert caught.value.code() is refused
            assert not (await registry.Heartbeat(WORKER, timeout=20, metadata=ours.as_worker.metadata)).known
            generate = client_pb2_grpc.SluiceServiceStub(channel).Generate(client_pb2.GenerateRequest(), timeout=20)
            with pytest.raises(grpc.aio.AioRpcError, match="no key"):
                async for _ in generate:
                    pass


async def test_keys_work_without_tls(keys: dict[str, object]) -> None:
    """Where something else encrypts."""
    config = configured({name: str(file) for name, file in keys.items()})
    async with serving(config) as server, http_of(server) as http:
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/v1/models", headers={"Authorization": "Bearer client-1"})).status_code == 200
        assert await status_code(client_trust(config.security), server.grpc_port) is grpc.StatusCode.OK
        assert await status_code(Trust(), server.grpc_port) is grpc.StatusCode.UNAUTHENTICATED


async def test_probes_know_the_authority(
    authority: Authority, keys: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    """They need no key."""
    config = configured(section(authority, authority.issue("probed"), **keys))
    async with serving(config) as server:
        asked = ["--alive", "--timeout", "20", "--address", f"127.0.0.1:{server.grpc_port}"]
        known = ["--ca", str(authority.file), "--server-name", NAME]
        assert await asyncio.to_thread(probe.main, [*asked, *known]) == 0
        assert await asyncio.to_thread(probe.main, [*asked[:-3], "1", *asked[-2:]]) == 1
        assert await asyncio.to_thread(probe.main, [*asked, "--ca", "/absent"]) == 1
    assert "'/absent': cannot be read" in capsys.readouterr().out


async def test_clients_are_told_what_is_wrong_with_certificates(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger, good = Authority(tmp_path, "stranger"), authority.issue("told")
    known, name = authority.file.read_bytes(), "other.test"

    async def said(config: SluiceConfig, trust: Trust) -> str:
        async with serving(config) as server:
            client = Client(f"127.0.0.1:{server.grpc_port}", trust)
            with client, pytest.raises(ClientError) as caught:
                await asyncio.to_thread(client.status, 20.0)
        return str(caught.value)

    secured, plain = configured(section(authority, good)), configured({})
    assert "its certificate is not one that security.ca knows" in await said(secured, Trust(stranger.file.read_bytes()))
    assert "its certificate is for another name" in await said(secured, Trust(known, name))
    assert "if it speaks TLS, security.ca is missing" in await said(secured, Trust())
    assert "it does not seem to speak TLS" in await said(plain, Trust(known))
    monkeypatch.setattr("engine.credentials._check_certificate", lambda _: None)  # it expires while it is served
    expired = configured(section(authority, authority.issue("expired", -DAY)))
    assert "its certificate has expired" in await said(expired, Trust(known, NAME))
