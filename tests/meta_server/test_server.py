"""Health, reflection, metrics, other paths, and the process itself."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from sluice.v1 import client_pb2, common_pb2, registry_pb2, registry_pb2_grpc

from tests.meta_server.deployment import MODEL_DIR, Deployment, deployed
from tests.meta_server.fakes import layout, until, worker_info

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(deployment: Deployment, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(deployment.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def wait_for_health(deployment: Deployment, status: int) -> None:
    for _ in range(200):
        seen = {await health_of(deployment, service) for service in ("", "sluice.v1.SluiceService")}
        if seen == {status}:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"health is {seen}, not {status}")


@pytest.mark.anyio
async def test_health_follows_the_groups() -> None:
    async with deployed(workers=False, lost_after_s=0.6) as deployment:
        await wait_for_health(deployment, NOT_SERVING)
        assert await health_of(deployment, "sluice.v1.RegistryService") == SERVING
        await deployment.add("prefill")
        decode = await deployment.add("decode", tp_size=1)
        await wait_for_health(deployment, SERVING)
        assert (await deployment.http.get("/health")).status_code == 200
        await decode.fall_silent()
        await wait_for_health(deployment, NOT_SERVING)
        response = await deployment.http.get("/health")
        assert response.status_code == 503
        assert "no complete decode group is ready" in response.json()["error"]["message"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(deployment, "unknown.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.anyio
async def test_reflection_lists_the_services() -> None:
    async with deployed(workers=False) as deployment:
        stub = reflection_pb2_grpc.ServerReflectionStub(deployment.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        async for response in call:
            names = {service.name for service in response.list_services_response.service}
            break
        call.cancel()
        assert {"sluice.v1.SluiceService", "sluice.v1.RegistryService", "grpc.health.v1.Health"} <= names


@pytest.mark.anyio
async def test_refused_registration_names_both_values() -> None:
    async with deployed() as deployment:
        stub = registry_pb2_grpc.RegistryServiceStub(deployment.channel)
        info = worker_info("decode", group=1, layout=layout(block_size=64))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Register(registry_pb2.RegisterRequest(info=info))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "block_size: 64" in caught.value.details() and "16" in caught.value.details()


@pytest.mark.anyio
async def test_worker_that_leaves_is_forgotten() -> None:
    async with deployed() as deployment:
        await deployment.decode.fall_silent()
        await deployment.decode.leave()
        assert not await deployment.decode.beat(), "it has to register again"
        assert [state.info.worker_id for state in deployment.server.registry.states()] == ["prefill-0/tp0"]


@pytest.mark.anyio
async def test_stop_ends_open_streams_with_an_error() -> None:
    async with deployed() as deployment:
        deployment.decode.decode.script.hold = "finished"
        body = {"prompt": [5], "max_tokens": 2, "stream": True}
        async with deployment.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert "text_completion" in await anext(lines)
            begun = time.monotonic()
            stopping = asyncio.create_task(deployment.stop())
            *_, last, end = [line async for line in lines if line]
            await stopping
        assert time.monotonic() - begun < 4
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert end == "data: [DONE]"
        await until(lambda: deployment.decode.decode.open == 0, "decode was told")


@pytest.mark.anyio
async def test_pools_of_the_deployment_are_summed_over_prefill_groups() -> None:
    async with deployed(workers=False) as deployment:
        for group in (0, 1):
            worker = await deployment.add("prefill", group=group)
            worker.pools.append(common_pb2.PoolUsage(name="pool_bytes", used=10 + group, total=100, unit="bytes"))
            await worker.beat()
        (pool,) = (await deployment.client.GetStatus(client_pb2.GetStatusRequest())).pools
        assert (pool.name, pool.used, pool.total, pool.unit) == ("memcache", 21, 200, "bytes")


@pytest.mark.anyio
async def test_metrics_count_requests_and_show_workers() -> None:
    async with deployed() as deployment:
        await deployment.complete(max_tokens=4)
        await deployment.complete(max_tokens=-1)
        response = await deployment.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        lines = response.text.splitlines()
        for line in (
            'sluice_requests_total{outcome="finished"} 1.0',
            'sluice_requests_total{outcome="refused"} 1.0',
            'sluice_tokens_total{kind="completion"} 4.0',
            "sluice_requests_in_flight 0.0",
            "sluice_ttft_seconds_count 1.0",
            'sluice_worker_ready{worker="decode-0/dp0/tp0"} 1.0',
            'sluice_pool_total{pool="host_blocks",unit="blocks",worker="decode-0/dp0/tp0"} 256.0',
            'sluice_worker_total{name="bytes_pulled",worker="prefill-0/tp0"} 12.0',
        ):
            assert line in lines, line


@pytest.mark.anyio
async def test_models_and_unknown_paths() -> None:
    async with deployed(workers=False) as deployment:
        (card,) = (await deployment.http.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"], card["object"]) == ("passkey", 4096, "model")
        assert (await deployment.http.get("/v1/models/passkey")).json() == card
        for method, path, status in (
            ("GET", "/v1/models/other", 404),
            ("GET", "/nowhere", 404),
            ("GET", "/v1/completions", 405),
        ):
            response = await deployment.http.request(method, path)
            assert response.status_code == status
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def write_config(folder: Path, grpc_port: int, http_port: int) -> Path:
    file = folder / "sluice.yaml"
    tree = {"model": {"path": str(MODEL_DIR)}, "grpc": {"port": grpc_port}, "http": {"port": http_port}}
    file.write_text(yaml.safe_dump(tree))
    return file


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def start_process(config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "meta_server.main", "--config", str(config)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2])


def wait_for_http(port: int) -> None:
    for _ in range(300):
        try:
            httpx.get(f"http://127.0.0.1:{port}/health")
            return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the meta server does not answer")


def test_sigterm_ends_with_status_0_within_5_seconds(tmp_path: Path) -> None:
    port = free_port()
    process = start_process(write_config(tmp_path, free_port(), port))
    try:
        wait_for_http(port)
        idle = httpx.Client()
        idle.get(f"http://127.0.0.1:{port}/v1/models")  # a kept-alive connection must not hold the stop up
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
        assert (process.returncode, "Traceback" in errors) == (0, False), errors
        assert time.monotonic() - begun < 5
        idle.close()
    finally:
        process.kill()


@pytest.mark.parametrize("section", ["grpc", "http"])
def test_taken_port_is_a_clear_start_up_error(tmp_path: Path, section: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        ports = {"grpc": free_port(), "http": free_port(), section: port}
        process = start_process(write_config(tmp_path, ports["grpc"], ports["http"]))
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"{section}.port = {port}: cannot listen" in errors and "Traceback" not in errors


def test_import_needs_no_torch() -> None:
    code = "import sys, meta_server.main; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])
