"""The pool's speed as prefill uses it: one layer of a step's blocks at a time, at real sizes, against memcpy.

`python -m benchmarks.prefill_pool META_URL CONFIG_STORE_URL` is the member that measures, over the emulated driver.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.harness import Row, Timing, row_of
from benchmarks.prefill_side import CONFIG
from deploy.launcher import DeploymentFailed
from deploy.ports import can_connect
from deploy.processes import driver_environment, pool_service
from deploy.resolve import resolved
from engine.config import load_config
from prefill_node.block_checksums import broken, seal
from prefill_node.geometry import KvGeometry
from prefill_node.pool_layout import CHECKSUM_BYTES, Copy, PoolObjectLayout, TensorAddress
from transfer.hostcann import runtime
from transfer.mem_pool import PoolError
from transfer.mem_pool_messages import PoolOptions
from transfer.mem_pool_process import PoolProcess

_LAYERS = 8
_TOKENS = 2048  # of a step
_ROUNDS = 20
_MODEL_ROWS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "rope_dim": 64,
    "index_dim": 128,
    "element_bytes": 2,
}  # DeepSeek-V3.2, bfloat16
_BLOCK_SIZES = (16, 128)
_GOAL = 0.5
_REGION = 16 << 20  # device memory of a layer
_LEASE_MS = 60_000
_POOL_BYTES = 256 << 20


def pool_rows(console: Console) -> list[Row]:
    """Starts a pool of its own and a member that measures. Raises DeploymentFailed."""
    config = load_config(CONFIG, ["http.port=0", "grpc.port=0"])
    with resolved(config) as run:
        spec = pool_service(run)
        with open(run.run_dir / "pool.log", "wb") as log:
            service = subprocess.Popen(spec.argv, env=os.environ | spec.env, stdout=log, stderr=log)
        try:
            host, pool = run.config.runtime.host, run.config.pool
            deadline = time.monotonic() + 20
            while not can_connect(host, pool.config_port):
                if time.monotonic() > deadline:
                    raise DeploymentFailed("the pool's meta service does not start")
                time.sleep(0.05)
            urls = [f"tcp://{host}:{pool.meta_port}", f"tcp://{host}:{pool.config_port}"]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.prefill_pool", *urls],
                env=os.environ | driver_environment(run) | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                timeout=120,
                check=False,
            )
            if done.returncode:
                raise DeploymentFailed(f"the pool's member ended with status {done.returncode}")
            return [row_of(fields) for fields in json.loads(done.stdout.splitlines()[-1])]
        finally:
            service.kill()
            service.wait()


def _seconds(call: Callable[[int], object]) -> Timing:
    """Of one layer, by layers in turns, so that no copy finds its bytes in a cache."""
    spent = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for layer in range(_LAYERS):
            call(layer)
        spent.append((time.perf_counter() - begin) / _LAYERS)
    return Timing.of(spent[1:])


class _Step:
    """The blocks of a step of `_TOKENS` tokens: every layer's lie in a region of device memory and in pool objects."""

    def __init__(self, block_size: int, pool: PoolProcess, memory: int, *, checksums: bool) -> None:
        geometry = KvGeometry(block_size=block_size, indexer_layers=frozenset(range(_LAYERS)), **_MODEL_ROWS)
        self._pool = pool
        self._layout = PoolObjectLayout(geometry, _LAYERS, checksums=checksums)
        self._blocks = list(range(_TOKENS // block_size))
        self._planes = [size for size in geometry.layer_block(0) if size]
        self._tensors = [self._places(memory + layer * _REGION) for layer in range(_LAYERS)]
        self._words = [self._words_behind(tensors[-1]) for tensors in self._tensors] if checksums else None
        self._what = f"blocks of {block_size} tokens" + ("" if checksums else ", without checksums")
        self.keys = [f"{self._what} {block:04}" for block in self._blocks]
        self._objects = pool.alloc(self.keys, [self._layout.object_bytes] * len(self.keys))

    @property
    def layer_bytes(self) -> int:
        return sum(self._planes) * len(self._blocks)

    def put(self, layer: int) -> None:
        if self._words is not None:
            seal(layer, self.keys, self._words[layer], self._tensors[layer], self._blocks, self._blocks)
        copy = self._copy(layer)
        self._pool.save(copy.pool, copy.device, copy.sizes)

    def get(self, layer: int) -> None:
        copy = self._copy(layer)
        self._pool.load(copy.pool, copy.device, copy.sizes)
        if self._words is not None and broken(
            layer, self.keys, self._words[layer], self._tensors[layer], self._blocks, self._blocks
        ):
            raise PoolError("what came back is not what was saved")

    def row(self, verb: str, memcpy: Timing, timing: Timing) -> Row:
        ratio = memcpy.median / timing.median
        pieces = len(self._planes) * len(self._blocks)
        return Row(
            f"pool {verb}, {self._what}, over memcpy",
            self.layer_bytes / timing.median / 1e9,
            "GB/s",
            self.layer_bytes / memcpy.median / 1e9,
            ratio,
            f">= {_GOAL}x",
            ratio >= _GOAL,
            (memcpy.median / timing.high, memcpy.median / timing.low),
            f"a layer of {_TOKENS} tokens in {pieces} pieces of {self.layer_bytes // pieces} bytes on average",
        )

    def _places(self, address: int) -> list[TensorAddress]:
        tensors = []
        for size in self._planes:
            tensors.append(TensorAddress(address, size))
            address += size * len(self._blocks)
        return tensors

    def _words_behind(self, last: TensorAddress) -> Tensor:
        address = last.address + last.block_bytes * len(self._blocks)
        memory = (ctypes.c_char * (CHECKSUM_BYTES * len(self._blocks))).from_address(address)
        return torch.frombuffer(memory, dtype=torch.int32)

    def _copy(self, layer: int) -> Copy:
        tensors = self._tensors[layer]
        if self._words is not None:
            tensors = [*tensors, TensorAddress(self._words[layer].data_ptr(), CHECKSUM_BYTES)]
        return self._layout.copy(layer, tensors, self._blocks, self._blocks, self._objects)


def _measure(meta_url: str, config_store_url: str) -> list[Row]:
    memory = runtime.malloc(0, _LAYERS * _REGION)
    ctypes.memset(memory, 1, _LAYERS * _REGION)
    options = PoolOptions(
        meta_url=meta_url,
        config_store_url=config_store_url,
        device_id=0,
        dram_bytes=_POOL_BYTES,
        world_size=2,
        protocol="host_shm",
        timeout_s=30,
    )
    pool = PoolProcess(options, [(memory, _LAYERS * _REGION)], call_s=30)
    plain = ctypes.create_string_buffer(_LAYERS * _REGION)
    rows = []
    for block_size, checksums in itertools.product(_BLOCK_SIZES, (True, False)):
        step = _Step(block_size, pool, memory, checksums=checksums)
        put = _seconds(step.put)
        pool.finish(step.keys)  # objects can be loaded only when they are finished, and saved to only until then
        pool.lease(step.keys, _LEASE_MS)
        get = _seconds(step.get)
        memcpy = _seconds(partial(_plain_copy, ctypes.addressof(plain), memory, step.layer_bytes))
        rows += [step.row("put", memcpy, put), step.row("get", memcpy, get)]
        pool.remove(step.keys)
    pool.close()
    return rows


def _plain_copy(target: int, source: int, nbytes: int, layer: int) -> None:
    ctypes.memmove(target + layer * _REGION, source + layer * _REGION, nbytes)


def main() -> None:
    """Entry point of the member."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("meta_url")
    parser.add_argument("config_store_url")
    arguments = parser.parse_args()
    rows = _measure(arguments.meta_url, arguments.config_store_url)
    print(json.dumps([asdict(row) for row in rows]), flush=True)


if __name__ == "__main__":
    main()
