"""A meta server that is told to stop ends its requests first, and sends new ones elsewhere."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sluice.v1 import common_pb2

from meta_server import server as server_module
from tests.meta_server.deployment import deployed
from tests.meta_server.fakes import FIRST, until
from tests.meta_server.test_generate import ids, read_all

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quick_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_NOTICE_S", 0.3)


async def test_a_draining_server_ends_its_requests() -> None:
    """Field failure F3: NOT_SERVING from the moment of the signal, while the running answers are completed."""
    async with deployed(drain_s=20.0) as deployment:
        deployment.decode.decode.script.delay_s = 0.1
        over_grpc = asyncio.create_task(read_all(deployment.generate([5, 6, 7], max_tokens=12)))
        over_http = asyncio.create_task(deployment.stream("/v1/completions", {"prompt": [5], "max_tokens": 12}))
        await until(lambda: deployment.decode.decode.open == 2, "both are being decoded")
        begun = time.monotonic()
        draining = asyncio.create_task(deployment.server.drain())
        await asyncio.sleep(0.1)
        stub = health_pb2_grpc.HealthStub(deployment.channel)
        for service in ("", "sluice.v1.SluiceService", "sluice.v1.RegistryService"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING, service
        assert (await deployment.http.get("/health")).status_code == 503
        await draining
        responses = await over_grpc
        assert ids(responses) == [FIRST + index for index in range(12)]
        assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert (await over_http)[-1]["choices"][0]["finish_reason"] == "length"
        assert time.monotonic() - begun < 15, "it ends with its last request, not with runtime.drain_s"
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient().get(str(deployment.http.base_url))


async def test_a_drain_ends_when_its_time_is_up() -> None:
    async with deployed(drain_s=0.5) as deployment:
        deployment.decode.decode.script.hold = "finished"
        call = asyncio.create_task(read_all(deployment.generate([5], max_tokens=2)))
        await until(lambda: deployment.in_flight == 1, "it runs")
        begun = time.monotonic()
        await deployment.server.drain()
        assert 0.4 < time.monotonic() - begun < 3
        await deployment.stop()
        with pytest.raises(Exception, match="shutting down"):
            await call


async def test_answers_of_a_draining_server_end_their_connection() -> None:
    async with deployed(drain_s=5.0) as deployment:
        assert "connection" not in (await deployment.complete(max_tokens=2)).headers
        draining = asyncio.create_task(deployment.server.drain())
        await asyncio.sleep(0.05)
        answer = await deployment.complete(max_tokens=2)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        await draining


async def test_health_answers_while_workers_hang() -> None:
    """Field failure F4: a backend that vanishes or hangs must not make the front look dead."""
    async with deployed() as deployment:
        deployment.prefill.prefill.hold = True
        calls = [asyncio.create_task(read_all(deployment.generate([5], max_tokens=2))) for _ in range(3)]
        await until(lambda: deployment.prefill.prefill.open == 3, "prefill hangs in three requests")
        await deployment.decode.fall_silent()
        await asyncio.sleep(0.3)  # health follows the workers within 0.1 s
        stub = health_pb2_grpc.HealthStub(deployment.channel)
        begun = time.monotonic()
        for service in ("", "sluice.v1.SluiceService"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=1.0)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert time.monotonic() - begun < 1.0
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)


async def test_a_request_waits_for_a_group_that_is_being_replaced() -> None:
    async with deployed(max_reruns=1, rerun_wait_s=20.0) as deployment:
        await deployment.decode.leave()
        await deployment.decode.fall_silent()
        asked = asyncio.create_task(deployment.complete(max_tokens=2))
        await asyncio.sleep(0.3)
        assert not asked.done()
        await deployment.add("decode", epoch="decode-0/dp0/tp0@2")
        assert (await asked).status_code == 200


async def test_a_deployment_that_never_was_ready_refuses_at_once() -> None:
    async with deployed(workers=False, rerun_wait_s=20.0) as deployment:
        answer = await deployment.complete(max_tokens=2)
        assert answer.status_code == 503
        assert "no complete prefill and decode group is ready" in answer.json()["error"]["message"]
