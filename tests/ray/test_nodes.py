"""A deployment over two nodes of a Ray cluster, one of which dies; its stop ends requests first."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from deploy.client import Client
from tests.checkpoints import PASSKEY_GLM
from tests.oracle import Oracle, assert_tokens_match
from tests.ray.ray_cli import (
    OBJECT_STORE_BYTES,
    deployment_processes,
    folders_of,
    job_of,
    options,
    wait_announced,
    wait_for,
)
from tests.ray.requests import PROMPT, greedy, pids

pytestmark = pytest.mark.cluster


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without room for workers, and two nodes with two NPUs each, by name."""
    store = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
    try:
        yield started
    finally:
        started.shutdown()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "job.log"


@pytest.fixture
def job(cluster: Any, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The job's own command, as Ray runs it on the head."""
    for _ in range(2):
        cluster.add_node(num_cpus=2, resources={"NPU": 2}, object_store_memory=OBJECT_STORE_BYTES)
    fields = options(ray__prefill_resources="{NPU: 1}", ray__decode_resources="{NPU: 1}", runtime__drain_s=20)
    with job_of(cluster.address, log, *fields, RAY_JOB_STOP_WAIT_TIME_S="40") as running:
        yield running


def test_a_lost_node_is_replaced(cluster: Any, job: subprocess.Popen[bytes], log: Path) -> None:
    oracle = Oracle(PASSKEY_GLM).greedy(PROMPT, 24)
    with Client(wait_announced(log)[1]) as client:
        before = pids(client)
        homes = {worker: raylet_of(pid) for worker, pid in before.items()}
        assert homes["prefill-0/tp0"] != homes["decode-0/dp0/tp0"], "P and D are spread over the nodes"
        assert_tokens_match(list(greedy(client, 24)), oracle)

        folders = folders_of(deployment_processes())
        lost = next(n for n in cluster.worker_nodes if raylet_pid(n) == homes["decode-0/dp0/tp0"])
        cluster.remove_node(lost, allow_graceful=False)
        _, alive = psutil.wait_procs([psutil.Process(before["decode-0/dp0/tp0"])], timeout=10)
        assert not alive, "a worker outlives its node"
        assert_tokens_match(list(greedy(client, 24)), oracle)
        after = pids(client)
        assert raylet_of(after["decode-0/dp0/tp0"]) == homes["prefill-0/tp0"]
        assert after["prefill-0/tp0"] == before["prefill-0/tp0"], "the other node's group goes on"
        running = deployment_processes()
        folders |= folders_of(running)
        stream = greedy(client, 400)
        tokens = [next(stream) for _ in range(4)]
        job.send_signal(signal.SIGTERM)
        wait_for(lambda: "stopping" in log.read_text(), 10, log.read_text)
        assert_tokens_match([*tokens, *stream], Oracle(PASSKEY_GLM).greedy(PROMPT, 400))  # runtime.drain_s
    assert job.wait(40) == 0, log.read_text()
    wait_for(lambda: not deployment_processes(), 10, lambda: f"left: {deployment_processes()}")
    assert [folder for folder in folders if folder.exists()] == []


def raylet_pid(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def raylet_of(pid: int) -> int:
    """The node of a worker process: its actor's parent."""
    return next(parent.pid for parent in psutil.Process(pid).parents() if parent.name() == "raylet")
