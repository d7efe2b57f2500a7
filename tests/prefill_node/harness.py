"""A prefill rank in one process over plain CPU memory: real planner, gate, backend and operators; pool and reader are
in memory, and the reader is as slow as a test wants it."""

from __future__ import annotations

import ctypes
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sluice.v1 import registry_pb2, wire_pb2, worker_pb2
from torch import Tensor

from engine.kv_cache import CacheSpec, KVCacheManager
from engine.model.config import ModelConfig
from engine.model.decoder import DsaDecoder
from engine.model.draft import DraftLayer
from engine.model.loader import load_weights
from engine.sampling_params import SamplingParams
from engine.tp_channel import TpLeader
from prefill_node.backend import PrefillBackend
from prefill_node.block_keys import Writers, block_keys
from prefill_node.generation import GenerationWords
from prefill_node.geometry import KvGeometry
from prefill_node.layer_buffers import LayerBuffers
from prefill_node.leader import PrefillLeader
from prefill_node.link import Endpoint
from prefill_node.outcome import Outcome
from prefill_node.plan import plan_layer_buffers
from prefill_node.pool_client import PoolClient
from prefill_node.pool_health import GuardedPool
from prefill_node.pool_layout import PoolObjectLayout
from prefill_node.pool_loader import PoolLoader
from prefill_node.pool_objects import PoolObjects
from prefill_node.pool_saver import PoolSaver
from prefill_node.rank import PrefillRank
from prefill_node.reuse_gate import Consumer, ReuseGate
from prefill_node.routes import Routes
from prefill_node.saved_steps import SavedSteps, no_other_ranks
from prefill_node.scheduler import Limits, PrefillJob, PrefillScheduler
from transfer.mem_pool import PoolError

ENDPOINT = Endpoint("tcp://reader:1", "epoch", "decode-0", 0, 0, 1)


class HostAllocator:
    """Plain memory full of NaN: a row that is read before it was written spoils the result."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        tensor = torch.full((-(-nbytes // 4),), float("nan")).view(torch.uint8)[:nbytes].view(dtype).view(*shape)
        self.tensors.append(tensor)
        return tensor


class MemoryPool:
    """The pool client's contract over a dictionary. `fail` names calls that raise PoolError."""

    def __init__(self) -> None:
        self.objects: dict[str, ctypes.Array[ctypes.c_char]] = {}
        self.loads = 0
        self.removed: list[object] = []
        self.finished: set[str] = set()
        self.leased: set[str] = set()
        self.fail: set[str] = set()
        self.delay_s = 0.0

    def _enter(self, call: str, keys: Sequence[str] = ()) -> None:
        time.sleep(self.delay_s)
        for key in keys:
            if f"{call} {key}" in self.fail:
                raise PoolError(f"{call} of {key} fails on demand")
        if call in self.fail:
            raise PoolError(f"{call} fails on demand")

    def alloc(self, keys: Sequence[str], sizes: Sequence[int], *, wait_s: float = 0.0) -> list[int]:
        self._enter("alloc", keys)
        for key, size in zip(keys, sizes, strict=True):
            assert key not in self.objects
            self.objects[key] = ctypes.create_string_buffer(size)
        return [ctypes.addressof(self.objects[key]) for key in keys]

    def save(self, dst_gvas: Sequence[int], src_addrs: Sequence[int], sizes: Sequence[int]) -> None:
        self._enter("save")
        for dst, src, size in zip(dst_gvas, src_addrs, sizes, strict=True):
            ctypes.memmove(dst, src, size)

    def load(self, src_gvas: Sequence[int], dst_addrs: Sequence[int], sizes: Sequence[int]) -> None:
        self._enter("load")
        self.loads += 1
        for src, dst, size in zip(src_gvas, dst_addrs, sizes, strict=True):
            ctypes.memmove(dst, src, size)

    def finish(self, keys: Sequence[str]) -> None:
        self._enter("finish", keys)
        self.finished.update(keys)

    def abort(self, keys: Sequence[str]) -> None:
        self.remove(keys)

    def lease(self, keys: Sequence[str], ttl_ms: int) -> list[int | None]:
        self._enter("lease", keys)
        found = [key in self.finished for key in keys]
        self.leased.update(key for key, exists in zip(keys, found, strict=True) if exists)
        return [ctypes.addressof(self.objects[key]) if here else None for key, here in zip(keys, found, strict=True)]

    def exists(self, keys: Sequence[str]) -> list[bool]:
        self._enter("exists", keys)
        return [key in self.finished for key in keys]

    def locate(self, keys: Sequence[str]) -> list[int | None]:
        self._enter("locate", keys)
        return [ctypes.addressof(self.objects[key]) if key in self.finished else None for key in keys]

    def release(self, keys: Sequence[str]) -> None:
        self._enter("release", keys)
        self.leased.difference_update(keys)

    def remove(self, keys: Sequence[str]) -> list[bool]:
        self.finished.difference_update(keys)
        gone = [self.objects.pop(key, None) for key in keys]
        self.removed.extend(gone)  # a leased object's memory stays readable
        return [each is not None for each in gone]


class NoGenerations:
    """Generation words that nobody changes."""

    def bump(self, slot: int) -> int:
        return 0


@dataclass
class SlowReader:
    """Stands for publisher and decode: copies what was published after `delay_s`, then opens the gate."""

    gate: ReuseGate
    buffers: LayerBuffers
    delay_s: float = 0.0
    rows: dict[tuple[int, str, str], dict[int, Tensor]] = field(default_factory=dict)  # by layer, request, kind
    finished: list[str] = field(default_factory=list)
    repeated: int = 0
    failure: str | None = None
    calls: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    beginnings: dict[str, int] = field(default_factory=dict)  # by request: how often it began again
    _sequences: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def connect(self, destination: worker_pb2.Destination) -> Endpoint:
        return ENDPOINT

    def destination(self, request_id: str, tokens: int, cached_tokens: int) -> worker_pb2.Destination:
        return worker_pb2.Destination(request_id=request_id, generation=7, cached_tokens=cached_tokens)

    def drop(self, request_id: str) -> None:
        """Nothing to forget."""

    def publish(
        self,
        layer: int,
        slot: int,
        endpoint: Endpoint,
        entries: Sequence[wire_pb2.ReadEntry],
        finished: Sequence[str] = (),
    ) -> int | None:
        consumer = Consumer("read", next(self._sequences))
        self.gate.add(slot, consumer, time.monotonic() + 10.0)
        self.calls.append((layer, tuple(entry.request_id for entry in entries)))
        self.beginnings.update((entry.request_id, entry.begun_again) for entry in entries)
        threading.Thread(target=self._read, args=(layer, slot, consumer, entries, finished), daemon=True).start()
        return consumer.ident

    def _read(
        self,
        layer: int,
        slot: int,
        consumer: Consumer,
        entries: Sequence[wire_pb2.ReadEntry],
        finished: Sequence[str],
    ) -> None:
        time.sleep(self.delay_s)
        buffer = self.buffers.of_layer(layer)
        for entry in entries:
            for kind, tensor, start, blocks in (
                ("ckv", buffer.ckv, entry.main_start, entry.main_blocks),
                ("k_rope", buffer.k_rope, entry.main_start, entry.main_blocks),
                ("indexer", buffer.indexer and buffer.indexer.keys, entry.indexer_start, entry.indexer_blocks),
            ):
                kept = self.rows.setdefault((layer, entry.request_id, kind), {})
                for index, block in enumerate(blocks, start=start):
                    assert tensor is not None
                    self.repeated += index in kept  # only a request that starts over sends a block twice
                    kept[index] = tensor[block, :, 0].clone()
        self.finished.extend(finished)
        self.gate.done(slot, consumer)

    def pulled(self, layer: int, request_id: str, kind: str, tokens: int) -> Tensor:
        blocks = self.rows[layer, request_id, kind]
        assert sorted(blocks) == list(range(len(blocks)))
        return torch.cat([blocks[index] for index in sorted(blocks)])[:tokens]


def settle(saver: PoolSaver) -> None:
    """Waits until everything asked for so far is done."""
    saver.hold("nobody", ())()


class Rig:
    """One prefill rank over `model_dir`, with `shared` buffers, running real steps."""

    def __init__(
        self,
        model_dir: Path,
        *,
        shared: int = 1,
        independent: Sequence[int] = (0,),
        block_size: int = 16,
        budget: int = 64,
        blocks: int = 48,
        pool_timeout_s: float = 5.0,
        channel: TpLeader | None = None,
        tp_size: int = 1,
        max_requests: int = 8,
        dtype: torch.dtype = torch.float32,
        drafts: bool = False,
        pool: PoolClient | None = None,
        group: int = 0,
        groups: int = 1,
        checksums: bool = False,
        max_whole_tokens: int = 4096,
        max_waiting: int = 64,
        lease_s: float = 60.0,
        writes: bool = True,
        saved_steps: SavedSteps = no_other_ranks,
        gate_closes: bool = True,
        words_change: bool = True,
        make_reader: Callable[[Rig], Any] | None = None,
    ) -> None:
        """`make_reader` replaces SlowReader; without `words_change` nobody can see that a slot was given up."""
        config = ModelConfig.from_dir(model_dir)
        self.config = config = config.with_draft() if drafts else config
        decoder = DsaDecoder(config, load_weights(model_dir, config, dtype), None, dtype)
        geometry = KvGeometry(
            block_size=block_size,
            kv_lora_rank=config.kv_lora_rank,
            rope_dim=config.qk_rope_head_dim,
            index_dim=config.index_head_dim,
            element_bytes=dtype.itemsize,
            indexer_layers=frozenset(config.indexer_layers),
        )
        plan = plan_layer_buffers(config.num_layers, list(independent), shared)
        self.allocator = HostAllocator()
        self.buffers = LayerBuffers(self.allocator, plan, geometry, blocks, dtype, checksums=checksums)
        self.words = GenerationWords(self.buffers.generation_words)
        self.gate = ReuseGate(
            plan.num_slots, self.words if words_change else NoGenerations(), save_grace_s=1.0, closes=gate_closes
        )
        self.request_errors: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.reader = make_reader(self) if make_reader else SlowReader(self.gate, self.buffers)
        self.pool: Any = pool or MemoryPool()
        self.guarded = guarded = GuardedPool(self.pool, retry_s=0.05)
        layout = PoolObjectLayout(geometry, config.num_layers, checksums=checksums)
        self.lookahead = int(drafts)
        self.layout = registry_pb2.KvLayout(fingerprint="model", block_size=block_size)
        self.saver = PoolSaver(
            guarded,
            PoolObjects(guarded, Writers(group, groups), layout.object_bytes, lease_s),
            layout,
            self.buffers,
            self.gate,
            writes=writes,
            timeout_s=pool_timeout_s,
            saved_steps=saved_steps,
        )
        self.loader = PoolLoader(guarded, layout, self.buffers, pool_timeout_s)
        self.routes = Routes(self.reader)
        self.backend = backend = PrefillBackend(
            config, self.buffers, self.gate, self.reader, self.routes, self.loader, self.saver
        )
        self.rank = PrefillRank(
            decoder,
            backend,
            self.routes,
            self.reader,
            self.saver,
            self.request_errors,
            block_size,
            DraftLayer(decoder) if drafts else None,
        )
        spec = CacheSpec(block_size, blocks)
        self.cache = KVCacheManager({"main": spec, "indexer": spec})
        limits = Limits(block_size, budget, max_requests, max_waiting, 5000, plan.has_reuse, max_whole_tokens)
        self.leader = PrefillLeader(
            PrefillScheduler(self.cache, limits),
            self.rank,
            channel or TpLeader("/tmp", "unused", 1),
            tp_size=tp_size,
            step_timeout_s=5.0,
        )
        self.outcomes: dict[str, Outcome] = {}

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        cached_tokens: int = 0,
        start_by: float = math.inf,
        deadline: float = math.inf,
        params: SamplingParams | None = None,
    ) -> int:
        return self.leader.submit(
            PrefillJob(
                request_id, tuple(prompt), deadline, start_by, keys=block_keys(self.layout, prompt, self.lookahead)
            ),
            params or SamplingParams(temperature=0.0),
            self.reader.destination(request_id, len(prompt), cached_tokens),
            partial(self.outcomes.__setitem__, request_id),
        )

    def run(self, *requests: str, timeout_s: float = 60.0) -> None:
        """Runs steps until these requests have ended."""
        deadline = time.monotonic() + timeout_s
        while not self.outcomes.keys() >= set(requests):
            assert time.monotonic() < deadline, f"only {sorted(self.outcomes)} of {requests} ended"
            self.leader.run_once()

    def settle(self) -> None:
        """Waits until no reader and no save needs a buffer any more."""
        deadline = time.monotonic() + 10.0
        while not self.gate.idle():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        settle(self.saver)
        settle(self.saver)

    def used_blocks(self) -> int:
        return sum(usage.used for usage in self.cache.usage().values())

    def close(self) -> None:
        self.routes.close()
        self.backend.close()
        self.saver.close()
        self.loader.close()
