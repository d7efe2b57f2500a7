"""Whole prefill processes over the real MemFabric and MemCache, pulled by a real puller."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from engine.config import SluiceConfig, build_config
from transfer import hostcann

REPOSITORY = Path(__file__).resolve().parents[2]
HBM_BYTES = 256 << 20


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


class Deployment:
    """MetaService, one prefill group, and the reader; ended and swept on exit."""

    def __init__(
        self, model_dir: Path, folder: Path, prefill: dict[str, Any], decode_tp: int, *, with_pool: bool = True
    ) -> None:
        self._with_pool = with_pool
        grpc_port, meta, config_store, metrics, store = free_ports(5)
        tree = {
            "model": {"path": str(model_dir), "max_model_len": 1024},
            "prefill": prefill,
            "decode": {"tp": decode_tp, "hot_tokens": 64},
            "transfer": {"store_port": store},
            "pool": {"dram_bytes": 64 << 20, "meta_port": meta, "config_port": config_store, "metrics_port": metrics},
            "grpc": {"port": grpc_port},
            "runtime": {"run_dir": str(folder), "heartbeat_s": 0.2},
        }
        self.config: SluiceConfig = build_config(tree)
        self.root = Path("/dev/shm") / f"sluice-prefill-test-{os.getpid()}-{secrets.token_hex(3)}"
        self._folder = folder
        self._file = folder / "sluice.yaml"
        self._file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        devices = self.config.worker_count
        driver = hostcann.environment(self.root, hostcann.DEFAULT_CHIP, devices, HBM_BYTES)
        self._environment = os.environ | driver | {"OMP_NUM_THREADS": "1"}
        self._children: list[subprocess.Popen[bytes]] = []

    def start_pool(self) -> None:
        """The MetaService; returns when it listens."""
        pool, runtime = self.config.pool, self._folder
        self._start(
            "memcache-meta",
            "transfer.mem_pool_service",
            *("--meta-url", f"tcp://127.0.0.1:{pool.meta_port}"),
            *("--config-store-url", f"tcp://127.0.0.1:{pool.config_port}"),
            *("--metrics-url", f"http://127.0.0.1:{pool.metrics_port}"),
            *("--log-dir", str(runtime)),
        )
        deadline = time.monotonic() + 20
        while not _listens(pool.meta_port):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def __enter__(self) -> Deployment:
        if self._with_pool:
            self.start_pool()
        self.workers = [
            self._start(
                f"prefill-{rank}",
                "prefill_node.main",
                *("--config", str(self._file), "--group", "0", "--tp-rank", str(rank)),
                *("--rendezvous", f"file://{self._folder}/prefill.rendezvous"),
            )
            for rank in range(self.config.prefill.tp)
        ]
        return self

    def read(self) -> dict[str, Any]:
        """Runs the reader to its end; its findings."""
        done = subprocess.run(
            [sys.executable, "-m", "tests.prefill_node.wheel_reader", str(self._file)],
            cwd=REPOSITORY,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, f"{done.stderr}\n{self.logs()}"
        findings: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return findings

    def stop_workers(self) -> list[int]:
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)
        return [worker.wait(15) for worker in self.workers]

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in self._folder.glob("*.log"))

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            if child.poll() is None:
                child.kill()
                child.wait(10)
        hostcann.sweep(self.root)

    def _start(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=REPOSITORY,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._children.append(child)
        return child


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def deploy(tiny_model: Path, tmp_path: Path) -> Iterator[Any]:
    started: list[Deployment] = []

    def start(decode_tp: int = 1, with_pool: bool = True, **prefill: Any) -> Deployment:
        started.append(Deployment(tiny_model, tmp_path, prefill, decode_tp, with_pool=with_pool).__enter__())
        return started[-1]

    yield start
    for deployment in started:
        deployment.__exit__()


def assert_right(found: dict[str, Any], decode_tp: int) -> dict[str, int]:
    """Every prompt's token and rows are right and nothing is held; the cached tokens of those that had some."""
    for name, request in found["requests"].items():
        assert request["ended"] == [None] * decode_tp, (name, request)
        assert request["token"] == request["expected"], name
        assert request["error"] < 2e-4, name
    assert {name: used for name, (used, _) in found["pools"].items()} == dict.fromkeys(found["pools"], 0)
    return {name: request["cached"] for name, request in found["requests"].items() if request["cached"]}


def assert_delivered(found: dict[str, Any], decode_tp: int, shared: int) -> None:
    assert assert_right(found, decode_tp) == {"long again": 288, "aligned again": 48, "short again": 32}
    assert found["gauges"]["layer_buffers"] == 1 + shared
    assert found["counters"]["bytes_saved"] > 0 < found["counters"]["bytes_loaded"]


@pytest.mark.cluster
@pytest.mark.parametrize(("tp", "decode_tp"), [(1, 1), (2, 2)])
def test_prefill_over_the_wheels_delivers_what_a_dense_model_computes(deploy, tp, decode_tp):
    deployment = deploy(decode_tp, tp=tp, shared_buffers=1, max_tokens_per_step=96, kv_blocks=64)
    assert_delivered(deployment.read(), decode_tp, shared=1)
    assert deployment.stop_workers() == [0] * tp


@pytest.mark.cluster
def test_a_pool_that_is_absent_at_the_start_is_joined_when_it_comes(deploy):
    """Until then prefill works without it and says so; a stop signal still works afterwards."""
    deployment = deploy(1, with_pool=False, shared_buffers=1, max_tokens_per_step=96, kv_blocks=64)
    found = deployment.read()
    assert assert_right(found, 1) == {}
    assert found["gauges"]["pool_up"] == 0 and "pool_cached_bytes" not in found["gauges"]
    assert "without the pool: the pool cannot be joined" in found["detail"]
    deployment.start_pool()
    deadline = time.monotonic() + 20
    while "joined the pool" not in deployment.logs():
        assert time.monotonic() < deadline, deployment.logs()
        time.sleep(0.05)
    found = deployment.read()
    assert_delivered(found, decode_tp=1, shared=1)
    assert found["gauges"]["pool_up"] == 1 and found["detail"] == ""
    assert found["gauges"]["pool_cached_objects"] >= 18 + 3 + 2
    assert found["gauges"]["pool_total_bytes"] > found["gauges"]["pool_cached_bytes"] > 0
    assert deployment.stop_workers() == [0]


@pytest.mark.cluster
def test_a_killed_follower_ends_its_leader(deploy):
    deployment = deploy(1, tp=2, shared_buffers=2, max_tokens_per_step=96, kv_blocks=64)
    found = deployment.read()
    assert_delivered(found, decode_tp=1, shared=2)
    deployment.workers[1].kill()
    deployment.workers[1].wait(10)
    time.sleep(0.2)
    request = worker_pb2.PrefillRequest(
        request_id="late",
        prompt=[2, 3],
        sampling=common_pb2.SamplingParams(max_tokens=1),
        destination=worker_pb2.Destination(request_id="late"),
    )
    with grpc.insecure_channel(found["leader"]) as channel, pytest.raises(grpc.RpcError) as caught:
        worker_pb2_grpc.PrefillServiceStub(channel).Prefill(request, timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert deployment.workers[0].wait(15) == 1
    assert "prefill-0: rank 1 takes no commands any more" in deployment.logs()
