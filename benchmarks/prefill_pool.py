"""The pool's speed as prefill uses it: its own parts save and load a step's layers, at real sizes, against memcpy.

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
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.console import Console
from sluice.v1 import registry_pb2

from benchmarks.harness import Row, row_of, time_in_turns
from benchmarks.prefill_side import CONFIG
from deploy.launcher import DeploymentFailed
from deploy.ports import can_connect
from deploy.processes import driver_environment, pool_service
from deploy.resolve import resolved
from engine.config import load_config
from engine.device import Device
from prefill_node.block_keys import Writers, block_keys
from prefill_node.generation import GenerationWords
from prefill_node.geometry import KvGeometry
from prefill_node.joining_pool import JoiningPool
from prefill_node.layer_buffers import LayerBuffers
from prefill_node.plan import plan_layer_buffers
from prefill_node.pool_client import PoolClient
from prefill_node.pool_health import GuardedPool
from prefill_node.pool_layout import PoolObjectLayout
from prefill_node.pool_loader import PoolLoader
from prefill_node.pool_objects import Held, PoolObjects
from prefill_node.pool_saver import PoolSaver
from prefill_node.prefetch import Prefetcher
from prefill_node.reuse_gate import ReuseGate
from prefill_node.steps import Chunk
from transfer.mem_pool import PoolError
from transfer.mem_pool_messages import PoolOptions
from transfer.mem_pool_process import PoolProcess

_LAYERS = 8
_TOKENS = 2048  # of a step
_MODEL_ROWS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "rope_dim": 64,
    "index_dim": 128,
    "element_bytes": 2,
}  # DeepSeek-V3.2, bfloat16
_BLOCK_SIZES = (16, 128)
_GOAL = 0.5
_ROUNDS, _BUDGET_S = 20, 1.0
_CALL_S = 30
_LEASE_S = 60.0
_POOL_BYTES = 256 << 20
_REQUEST = "benchmark"


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


class _Step:
    """The blocks of one step, saved and loaded by the worker's own parts; each layer has a buffer of its own."""

    def __init__(self, block_size: int, pool: PoolClient, device: Device, *, checksums: bool) -> None:
        geometry = KvGeometry(block_size=block_size, indexer_layers=frozenset(range(_LAYERS)), **_MODEL_ROWS)
        layout = PoolObjectLayout(geometry, _LAYERS, checksums=checksums)
        plan = plan_layer_buffers(_LAYERS, "all", 1)
        blocks = tuple(range(_TOKENS // block_size))
        self.buffers = LayerBuffers(device, plan, geometry, len(blocks), torch.bfloat16, checksums=checksums)
        self._gate = ReuseGate(_LAYERS, GenerationWords(self.buffers.generation_words), save_grace_s=_CALL_S)
        objects = PoolObjects(pool, Writers(0, 1), layout.object_bytes, _LEASE_S)
        self._saver = PoolSaver(pool, objects, layout, self.buffers, self._gate, writes=True, timeout_s=_CALL_S)
        self._loader = PoolLoader(pool, layout, self.buffers, _CALL_S)
        self._prefetcher = Prefetcher(plan, self._gate, self._loader)
        tokens = tuple(range(_TOKENS))
        named = registry_pb2.KvLayout(fingerprint="0" * 16, block_size=block_size)
        keys = block_keys(named, tokens, checksums=checksums)
        self._chunk = Chunk(_REQUEST, 0, tokens, 2 * _TOKENS, blocks, blocks, keys=keys)
        self._chunks = [self._chunk]
        self._earlier: dict[str, Callable[[], Held]] = {}
        self._copy = ctypes.create_string_buffer(_LAYERS * self.layer_bytes)
        self._what = f"blocks of {block_size} tokens" + ("" if checksums else ", without checksums")

    @property
    def layer_bytes(self) -> int:
        return self.buffers.geometry.layer_block(0).total * len(self._chunk.main_blocks)

    def rows(self) -> list[Row]:
        """Objects can be saved to until they are finished, and loaded from afterwards. Raises PoolError."""
        for address, nbytes in self.buffers.regions():
            ctypes.memset(address, 1, nbytes)
        self._saver.begin_step(self._chunks)
        put = self._row("put", self._put)
        self._saver.end_step(self._chunks, ())
        held = self._saver.hold(_REQUEST, self._chunk.keys)()
        # Rows that have no names are not confirmed to be in their place: that takes a call a step, not one a layer.
        self._earlier = {_REQUEST: lambda: held._replace(names=())}
        get = self._row("get", self._get)
        self._saver.release(_REQUEST, distrust=True)
        for part in (self._prefetcher, self._loader, self._saver):
            part.close()
        return [put, get]

    def _put(self, run: int) -> None:
        """Every layer, as a step does that computes in no time."""
        for layer in range(_LAYERS):
            self._saver.save(layer, self._chunks)
        last_first = range(_LAYERS - 1, -1, -1)  # whoever computes meanwhile would not wake up for each
        for failure in itertools.chain.from_iterable(map(self._gate.wait, last_first)):
            raise PoolError(failure.reason)

    def _get(self, run: int) -> None:
        """Every layer, as a step does that computes in no time."""
        self._prefetcher.begin([replace(self._chunk, start=_TOKENS, takes_prefix=True)], self._earlier)
        for layer in range(_LAYERS - 1, -1, -1):
            if causes := self._prefetcher.ready(layer):
                raise PoolError(causes[_REQUEST])
            self._prefetcher.computed(layer)

    def _memcpy(self, run: int) -> None:
        for layer, (address, _) in enumerate(self.buffers.regions()):
            ctypes.memmove(ctypes.addressof(self._copy) + layer * self.layer_bytes, address, self.layer_bytes)

    def _row(self, verb: str, copies: Callable[[int], None]) -> Row:
        """All layers each time, so that no copy finds its bytes in a cache."""
        pair = time_in_turns(copies, self._memcpy, budget_s=_BUDGET_S, now=time.perf_counter, least=_ROUNDS)
        nbytes = _LAYERS * self.layer_bytes
        ratio = 1 / pair.ratio.median
        parts = sum(size > 0 for size in self.buffers.geometry.layer_block(0))
        pieces = parts * len(self._chunk.main_blocks)
        return Row(
            f"pool {verb}, {self._what}, over memcpy",
            nbytes / pair.subject.median / 1e9,
            "GB/s",
            nbytes / pair.baseline.median / 1e9,
            ratio,
            f">= {_GOAL}x",
            ratio >= _GOAL,
            (1 / pair.ratio.high, 1 / pair.ratio.low),
            f"{_LAYERS} layers of {_TOKENS} tokens, each {pieces} pieces of {self.layer_bytes // pieces} bytes or so",
        )


def _measure(meta_url: str, config_store_url: str) -> list[Row]:
    options = PoolOptions(
        meta_url=meta_url,
        config_store_url=config_store_url,
        device_id=0,
        dram_bytes=_POOL_BYTES,
        world_size=2,
        protocol="host_shm",
        timeout_s=_CALL_S,
    )
    device = Device(0)

    def open_pool() -> PoolProcess:
        regions = itertools.chain.from_iterable(step.buffers.pool_regions() for step in steps)
        return PoolProcess(options, list(regions), call_s=_CALL_S)

    joining = JoiningPool(open_pool)
    pool = GuardedPool(joining)
    shapes = itertools.product(_BLOCK_SIZES, (True, False))
    steps = [_Step(block_size, pool, device, checksums=checksums) for block_size, checksums in shapes]
    joining.join()
    rows = [row for step in steps for row in step.rows()]
    joining.close()
    return rows


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
