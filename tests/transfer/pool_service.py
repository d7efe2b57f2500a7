"""A pool's meta service for tests, and members of its pool."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.transfer.hostcann_worker import CHIP, Worker
from transfer import hostcann
from transfer.mem_pool import PoolError
from transfer.pool_monitor import PoolMonitor, PoolUsage

MIB = 1 << 20
DEVICES, HBM_BYTES = 4, 64 * MIB


@dataclass
class Service:
    root: Path
    meta: str
    config_store: str
    metrics: str
    process: subprocess.Popen[bytes]

    def member(self, device: int, dram_bytes: int = 64 * MIB) -> Worker:
        """A worker in the pool with 8 MiB of registered device memory holding the device's number plus one."""
        child = Worker(self.root, devices=DEVICES, hbm_bytes=HBM_BYTES)
        child.start(
            f"""
import ctypes, time
from transfer.hostcann import runtime
from transfer.mem_pool import MemPool
SIZE = 8 << 20
memory = runtime.malloc({device}, SIZE)
ctypes.memset(memory, {device + 1}, SIZE)
urls = dict(meta_url={self.meta!r}, config_store_url={self.config_store!r})
pool = MemPool(**urls, device_id={device}, dram_bytes={dram_bytes}, world_size=8)
pool.register(memory, SIZE)
def byte(at): return ctypes.string_at(memory + at, 1)[0]
"""
        )
        return child


@contextlib.contextmanager
def started_service(successor_of: Service | None = None) -> Iterator[Service]:
    """A new meta service with a root of its own, at free ports or at those of an earlier one."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hostcann-test-") as folder:
        root = Path(folder) / "root"
        meta, config_store, metrics = _addresses(successor_of)
        urls = (
            f"--meta-url=tcp://{meta}",
            f"--config-store-url=tcp://{config_store}",
            f"--metrics-url=http://{metrics}",
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "transfer.mem_pool_service", *urls, f"--log-dir={folder}/log"],
            env={**os.environ, **hostcann.environment(root, CHIP, DEVICES, HBM_BYTES)},
        )
        try:
            wait_until_up(f"http://{metrics}")
            yield Service(root, f"tcp://{meta}", f"tcp://{config_store}", f"http://{metrics}", process)
        finally:
            process.kill()
            process.wait()


def _addresses(of: Service | None) -> tuple[str, ...]:
    if of is not None:
        return tuple(urlsplit(url).netloc for url in (of.meta, of.config_store, of.metrics))
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    addresses = tuple(f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes)
    for probe in probes:
        probe.close()
    return addresses


def wait_until_up(metrics: str) -> None:
    deadline = time.monotonic() + 15
    while True:
        try:
            pool_usage(metrics, deadline_s=1.0)
            return
        except PoolError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def used_within(service: Service, bytes_used: int, deadline_s: float) -> int:
    """The pool's used bytes, as soon as they are `bytes_used` or else at the deadline."""
    deadline = time.monotonic() + deadline_s
    while (used := pool_usage(service.metrics).used_bytes) != bytes_used and time.monotonic() < deadline:
        time.sleep(0.05)
    return used


def pool_usage(metrics_url: str, *, deadline_s: float = 2.0) -> PoolUsage:
    """What the meta service says of its pool. Raises PoolError when it does not answer."""
    monitor = PoolMonitor(metrics_url, deadline_s=deadline_s)
    try:
        return monitor.usage()
    finally:
        monitor.close()
