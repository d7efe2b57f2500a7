"""The worker's own processes over the real wheels and the emulated driver, against a bare registry."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sluice.v1 import common_pb2, registry_pb2, registry_pb2_grpc, worker_pb2, worker_pb2_grpc

from tests.checkpoints import random_checkpoint
from transfer import hostcann

START_S = 60.0
STOP_S = 10.0
DEVICES = 4
HBM_BYTES = 256 << 20
REPOSITORY = Path(__file__).parents[2]


def worker_process(folder: Path, sections: dict[str, Any], hbm_bytes: int) -> tuple[list[str], dict[str, str]]:
    """Command line (without the TP rank) and environment of a decode worker with this configuration."""
    config = folder / "sluice.yaml"
    fixed = {"transfer": {"store_port": 1}, "grpc": {"port": 1}}
    config.write_text(yaml.safe_dump({**fixed, **sections}))
    driver = hostcann.environment(folder / "driver", hostcann.DEFAULT_CHIP, DEVICES, hbm_bytes)
    command = [sys.executable, "-m", "decode_node.main", "--config", str(config), "--group", "0"]
    command += ["--rendezvous", f"file://{folder}/meeting"]
    return command, {**os.environ, **driver, "OMP_NUM_THREADS": "1"}


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    """Remembers who registered, and what they last said of themselves."""

    def __init__(self) -> None:
        self.workers: dict[str, registry_pb2.WorkerInfo] = {}
        self.statuses: dict[str, common_pb2.WorkerStatus] = {}

    async def Register(self, request: registry_pb2.RegisterRequest, context: Any) -> registry_pb2.RegisterResponse:
        self.workers[request.info.worker_id] = request.info
        return registry_pb2.RegisterResponse()

    async def Heartbeat(self, request: registry_pb2.HeartbeatRequest, context: Any) -> registry_pb2.HeartbeatResponse:
        self.statuses[request.worker_id] = request.status
        return registry_pb2.HeartbeatResponse(known=True)

    async def Leave(self, request: registry_pb2.LeaveRequest, context: Any) -> registry_pb2.LeaveResponse:
        self.workers.pop(request.worker_id)
        return registry_pb2.LeaveResponse()


@dataclass
class Replica:
    """The processes of one DP rank, ready."""

    registry: Registry
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                for process in self.processes:
                    assert process.poll() is None, f"a worker ended with status {process.returncode}"
                await asyncio.sleep(0.05)

    def used(self) -> int:
        return sum(pool.used for status in self.registry.statuses.values() for pool in status.pools)

    async def stop(self) -> list[int]:
        """Ends all with SIGTERM; their exit statuses."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        return [await asyncio.to_thread(process.wait, STOP_S) for process in self.processes]


@asynccontextmanager
async def replica(checkpoint: Path, folder: Path, tp: int) -> AsyncIterator[Replica]:
    registry = Registry()
    server = grpc.aio.server()
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sections = {
        "model": {"path": str(checkpoint)},
        "prefill": {"tp": tp},
        "decode": {"tp": tp, "hot_tokens": 64, "host_pool_bytes": "16MiB", "max_requests": 2},
        "grpc": {"port": port},
        "runtime": {"run_dir": str(folder), "heartbeat_s": 0.1, "startup_timeout_s": START_S},
    }
    command, environment = worker_process(folder, sections, HBM_BYTES)
    ready = Replica(registry)
    try:
        for rank in range(tp):
            arguments = [*command, "--tp-rank", str(rank)]
            ready.processes.append(subprocess.Popen(arguments, env=environment, cwd=REPOSITORY))
        names = {f"decode-0/dp0/tp{rank}" for rank in range(tp)}
        await ready.until(lambda: {n for n, s in registry.statuses.items() if s.ready} == names, START_S)
        yield ready
    finally:
        for process in ready.processes:
            process.kill()
            process.wait()
        await server.stop(0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("model") / "m", "glm_moe_dsa")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    driver = tmp_path / "driver"
    driver.mkdir()
    yield tmp_path
    assert [device.allocated_bytes for device in hostcann.counters(driver)] == [0] * DEVICES
    hostcann.sweep(driver)
    assert not driver.exists(), f"left behind: {list(driver.rglob('*'))}"


@pytest.mark.parametrize("tp", [1, 2])
def test_a_replica_starts_serves_and_stops(tp: int, checkpoint: Path, folder: Path) -> None:
    """Ready means SERVING and a destination with every rank's endpoint; SIGTERM ends all with status 0."""

    async def scenario() -> None:
        async with replica(checkpoint, folder, tp) as ready:
            leader = ready.registry.workers["decode-0/dp0/tp0"]
            async with grpc.aio.insecure_channel(leader.grpc_address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                request = health_pb2.HealthCheckRequest(service="sluice.v1.DecodeService")
                assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
                destination = await reserve(channel, ready)
                epochs = [ready.registry.workers[f"decode-0/dp0/tp{rank}"].epoch for rank in range(tp)]
                assert [endpoint.epoch for endpoint in destination.endpoints] == epochs
                assert len({endpoint.address for endpoint in destination.endpoints}) == tp
            gauges = ready.registry.statuses["decode-0/dp0/tp0"].gauges
            assert 0 < gauges["device_bytes"] < HBM_BYTES
            assert gauges["host_pool_bytes"] <= 16 << 20
            assert await ready.stop() == [0] * tp
            assert ready.registry.workers == {}

    asyncio.run(scenario())


async def reserve(channel: grpc.aio.Channel, ready: Replica) -> worker_pb2.Destination:
    """Admits a request, sees its memory in use, cancels it, sees every pool of every rank empty again."""
    stub: Any = worker_pb2_grpc.DecodeServiceStub(channel)
    call = stub.DecodeSession(timeout=30)
    sampling = common_pb2.SamplingParams(max_tokens=20)
    admit = worker_pb2.Admit(request_id="r1", prompt=[5] * 100, sampling=sampling)
    await call.write(worker_pb2.DecodeSessionRequest(admit=admit))
    destination: worker_pb2.Destination = (await call.read()).destination
    pools = len(ready.processes) + 1 + 7 + 7  # a pull on each rank, a hot row, 101 tokens in blocks of 16 twice
    await ready.until(lambda: ready.used() == pools, 5)
    call.cancel()
    await ready.until(lambda: ready.used() == 0, 5)
    return destination


def test_a_device_that_is_too_small_is_explained(checkpoint: Path, folder: Path) -> None:
    """The process ends with the fields to change; nothing is left on the device."""
    decode = {"hot_tokens": 4096, "max_requests": 64, "host_pool_bytes": "16MiB"}
    sections = {"model": {"path": str(checkpoint)}, "decode": decode, "runtime": {"run_dir": str(folder)}}
    command, environment = worker_process(folder, sections, 64 << 20)
    ended = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, timeout=START_S, text=True)
    assert ended.returncode == 1
    assert "hot buffers of 64 rows do not fit the device" in ended.stderr
    assert "lower decode.host_pool_bytes, decode.hot_tokens or decode.max_requests" in ended.stderr
