"""A deployment over two hosts with addresses of their own: two network namespaces, joined by a cable."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.client import Client
from tests.checkpoints import PASSKEY_GLM
from tests.oracle import Oracle, assert_tokens_match
from tests.ray.ray_cli import (
    OBJECT_STORE_BYTES,
    RayHead,
    deployment_processes,
    end_with_children,
    environment,
    folders_of,
    job_of,
    options,
    run,
    wait_announced,
    wait_for,
)
from tests.ray.requests import PROMPT, greedy

HEAD, NODE = "10.77.0.1", "10.77.0.2"
pytestmark = pytest.mark.cluster


@pytest.fixture
def node() -> Iterator[int]:
    """A second host's network, held by the process with this id."""
    with subprocess.Popen(["unshare", "--net", "sleep", "600"]) as holder:
        inside = f"nsenter --target {holder.pid} --net"
        commands = (
            "ip link add head0 type veth peer name node0",
            f"ip link set node0 netns {holder.pid}",
            f"ip address add {HEAD}/24 dev head0",
            "ip link set head0 up",
            f"{inside} ip address add {NODE}/24 dev node0",
            f"{inside} ip link set node0 up",
            f"{inside} ip link set lo up",
        )
        try:
            wait_for(lambda: psutil.Process(holder.pid).name() == "sleep", 10, lambda: "no second namespace")
            for command in commands:
                run(*shlex.split(command))
            yield holder.pid
        finally:
            subprocess.run(["ip", "link", "delete", "head0"], check=False)
            holder.kill()


@contextlib.contextmanager
def second_node(host: int) -> Iterator[None]:
    """`ray start` on the second host."""
    command = f"nsenter --target {host} --net ray start --address={HEAD}:6379 --node-ip-address={NODE} --num-cpus=2 "
    command += f"--object-store-memory={OBJECT_STORE_BYTES} --disable-usage-stats --block"
    started = subprocess.Popen(shlex.split(command), env=environment(), stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        end_with_children(started)


def test_units_on_two_hosts_reach_each_other_and_the_head(node: int, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    fields = options(ray__strategy="strict_spread", http__host="0.0.0.0", grpc__host="0.0.0.0")
    with RayHead(HEAD), second_node(node), job_of(f"{HEAD}:6379", log, *fields) as job:
        http_url, grpc_address = wait_announced(log)
        assert http_url.startswith(f"http://{HEAD}:") and grpc_address.startswith(f"{HEAD}:")
        with Client(grpc_address) as client:
            assert_tokens_match(list(greedy(client, 24)), Oracle(PASSKEY_GLM).greedy(PROMPT, 24))
            addresses = {worker.info.grpc_address.rpartition(":")[0] for worker in client.status().workers}
        assert addresses == {HEAD, NODE}
        assert '"ready"' in run("nsenter", "--target", str(node), "--net", "curl", "-s", f"{http_url}/health")
        folders = folders_of(deployment_processes(node))
        job.send_signal(signal.SIGTERM)
        assert job.wait(10) == 0, log.read_text()
        wait_for(lambda: not deployment_processes(node), 10, lambda: f"left: {deployment_processes(node)}")
        assert [folder for folder in folders if folder.exists()] == []
