"""A worker is NOT_SERVING until it is ready, registers, and registers again when the meta server forgot it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sluice.v1 import common_pb2, registry_pb2, registry_pb2_grpc, worker_pb2, worker_pb2_grpc

from engine.config import SluiceConfig, load_config
from engine.worker import WORKER_SERVICE, WorkerProcess

LOCAL = Path(__file__).parents[2] / "deploy/configs/local.yaml"


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    def __init__(self, refusal: str | None = None) -> None:
        self.refusal = refusal
        self.registered: list[str] = []
        self.left: list[str] = []
        self.forget = True
        self.beats: list[common_pb2.WorkerStatus] = []

    async def Register(self, request: Any, context: Any) -> registry_pb2.RegisterResponse:
        if self.refusal:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        self.registered.append(request.info.grpc_address)
        return registry_pb2.RegisterResponse(heartbeat_interval_ms=50)

    async def Heartbeat(self, request: Any, context: Any) -> registry_pb2.HeartbeatResponse:
        self.beats.append(request.status)
        known = not self.forget
        self.forget = False
        return registry_pb2.HeartbeatResponse(known=known)

    async def Leave(self, request: Any, context: Any) -> registry_pb2.LeaveResponse:
        self.left.append(request.worker_id)
        return registry_pb2.LeaveResponse()


def run(
    registry: Registry, body: Callable[[WorkerProcess, SluiceConfig], Awaitable[None]], startup_timeout_s: float = 60.0
) -> None:
    async def main() -> None:
        server = grpc.aio.server()
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        config = load_config(
            LOCAL, [f"grpc.port={port}", "runtime.heartbeat_s=0.05", f"runtime.startup_timeout_s={startup_timeout_s}"]
        )
        info = registry_pb2.WorkerInfo(worker_id="decode-0/dp0/tp0", epoch="e1")
        process = WorkerProcess(config, info, lambda: common_pb2.WorkerStatus(running=3, detail="opening the pool"))
        await process.start()
        try:
            await body(process, config)
        finally:
            await process.stop(0.1)
            await server.stop(0)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_not_serving_until_ready() -> None:
    async def body(process: WorkerProcess, _: SluiceConfig) -> None:
        async with grpc.aio.insecure_channel(process.info.grpc_address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def health(service: str) -> int:
                return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status

            names = ("", WORKER_SERVICE)
            assert [await health(n) for n in names] == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2
            await process.set_ready()
            assert [await health(n) for n in names] == [health_pb2.HealthCheckResponse.SERVING] * 2
            try:
                await health("sluice.v1.Unknown")
                raise AssertionError("an unknown service has no health")
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.NOT_FOUND
            worker = worker_pb2_grpc.WorkerServiceStub(channel)
            answer = await worker.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest(), timeout=5)
            assert (answer.status.running, answer.status.ready) == (3, True)
            process.fail("the device is gone")
            assert await process.run() == 1
            assert [await health(n) for n in names] == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2

    run(Registry(), body)


def test_a_forgotten_worker_registers_again_and_leaves_at_the_end() -> None:
    registry = Registry()

    async def body(process: WorkerProcess, _: SluiceConfig) -> None:
        while len(registry.registered) < 2 or len(registry.beats) < 3:
            await asyncio.sleep(0.02)
        assert set(registry.registered) == {process.info.grpc_address}

    run(registry, body)
    assert registry.left == ["decode-0/dp0/tp0"]


def test_a_refused_worker_ends_with_the_reason() -> None:
    registry = Registry(refusal="kv.block_size 16 on decode, 32 on prefill")

    async def body(process: WorkerProcess, _: SluiceConfig) -> None:
        assert await process.run() == 1
        assert process.failure is not None and "kv.block_size 16 on decode, 32 on prefill" in process.failure

    run(registry, body)


def test_a_start_that_hangs_ends_the_process() -> None:
    """Field failure: after a pool member was killed, joining the pool may never return."""

    async def hangs(process: WorkerProcess, _: SluiceConfig) -> None:
        assert await process.run() == 1
        assert process.failure == "not ready within runtime.startup_timeout_s = 0.1: opening the pool"

    async def gets_ready(process: WorkerProcess, _: SluiceConfig) -> None:
        await process.set_ready()
        await asyncio.sleep(1.5)
        assert process.failure is None

    run(Registry(), hangs, startup_timeout_s=0.1)
    run(Registry(), gets_ready, startup_timeout_s=0.1)
