"""One prefill or decode rank over the real MemFabric wheel, in a process of its own: JSON commands in, answers out.

python -m tests.transfer.wheel_peer prefill|decode DEVICE HOST_POOL_URL
"""

from __future__ import annotations

import ctypes
import json
import queue
import sys
import time
from collections.abc import Iterable

import torch
from sluice.v1 import worker_pb2

from decode_node.batch_reader import SOURCE_SCRATCH_BYTES
from prefill_node.generation import GenerationWords
from prefill_node.link import Endpoint, SourceInfo, TransferRefused
from prefill_node.publisher import Publisher
from prefill_node.reuse_gate import ReuseGate
from tests.kv_peers import (
    CKV,
    EPOCH,
    INDEXER_KEY,
    K_ROPE,
    LAYOUT,
    NUM_SLOTS,
    SLOT_OF_LAYER,
    Events,
    Memory,
    entry,
)
from tests.started_puller import started_puller
from transfer.host_pool import HostPool
from transfer.hostcann.runtime import malloc
from transfer.memfabric import MemFabricEngine

SEED = 11
PREFILL_BLOCKS, PREFILL_INDEXER = [7, 0, 3, 5, 2], [1, 6, 4, 0, 7]
CHUNKS = ((0, 2), (2, 5))
POOL_BYTES = 1 << 20


class Region:
    """Hands out pieces of one registered allocation."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._next, self._end = address, address + nbytes

    def take(self, nbytes: int) -> int:
        address, self._next = self._next, self._next + -(-nbytes // 64) * 64
        if self._next > self._end:
            raise MemoryError(f"no room for {nbytes} bytes")
        return address


def open_engine(role: str, device: int) -> tuple[MemFabricEngine, Region]:
    engine = MemFabricEngine(host="127.0.0.1", device_id=device, role=role, protocol="sdma", store_url="")  # type: ignore
    address = malloc(device, 1 << 20)
    engine.register(address, 1 << 20)
    return engine, Region(address, 1 << 20)


class PrefillPeer:
    def __init__(self, device: int) -> None:
        self.engine, region = open_engine("prefill", device)
        self.memory = Memory(8, SEED, region.take)
        words = (ctypes.c_int64 * NUM_SLOTS).from_address(region.take(8 * NUM_SLOTS))
        self.words = GenerationWords(torch.frombuffer(words, dtype=torch.int64))
        self.gate = ReuseGate(NUM_SLOTS, self.words, save_grace_s=1.0)
        self.errors: queue.Queue[tuple[str, str]] = queue.Queue()
        source = SourceInfo(
            worker_id="prefill-0/tp0",
            epoch=self.engine.session_id,
            session_id=self.engine.session_id,
            tp_rank=0,
            tp_size=1,
            layout=LAYOUT,
            layers=self.memory.layer_layouts(),
            generation_address=self.words.address,
        )
        self.publisher = Publisher(
            source,
            self.gate,
            self.words,
            lease_s=10.0,
            handshake_timeout_s=10.0,
            on_request_error=lambda request, text: self.errors.put((request, text)),
        )
        self.publisher.start()
        self.endpoint: Endpoint | None = None

    def connect(self, address: str) -> str:
        endpoint = worker_pb2.ReadEndpoint(address=address, epoch=EPOCH)
        try:
            self.endpoint = self.publisher.connect(
                worker_pb2.Destination(group="decode-0", tp_size=1, endpoints=[endpoint])
            )
        except TransferRefused as error:
            return str(error)
        return ""

    def publish(self, request: str, generation: int, chunks: Iterable[tuple[int, int]]) -> dict[str, object]:
        assert self.endpoint is not None
        started = time.monotonic()
        for start, end in chunks:
            for layer, slot in enumerate(SLOT_OF_LAYER):
                self.gate.wait(slot)
                indexer = PREFILL_INDEXER[start:end] if layer in LAYOUT.indexer_layers else []
                sent = entry(request, PREFILL_BLOCKS[start:end], start, indexer=indexer, generation=generation)
                last = end == len(PREFILL_BLOCKS) and layer == LAYOUT.num_layers - 1
                self.publisher.publish(layer, slot, self.endpoint, [sent], [request] if last else [])
        for slot in range(NUM_SLOTS):
            self.gate.wait(slot)
        errors = [self.errors.get() for _ in range(self.errors.qsize())]
        return {"errors": errors, "seconds": time.monotonic() - started, "idle": self.gate.idle()}

    def latencies(self, request: str, generation: int, count: int) -> list[float]:
        """Seconds from publishing a layer's first blocks until its gate is open, `count` times; finishes nothing."""
        assert self.endpoint is not None
        start, end = CHUNKS[0]
        sent = entry(
            request, PREFILL_BLOCKS[start:end], start, indexer=PREFILL_INDEXER[start:end], generation=generation
        )
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self.publisher.publish(0, SLOT_OF_LAYER[0], self.endpoint, [sent])
            self.gate.wait(SLOT_OF_LAYER[0])
            seconds.append(time.perf_counter() - began)
        return seconds

    def shift_generations(self, by: int) -> None:
        """Makes every word in device memory differ from what is announced."""
        for slot in range(NUM_SLOTS):
            ctypes.c_uint64.from_address(self.words.address + 8 * slot).value += by


class DecodePeer:
    """Main KV in the host pool, indexer keys on the device."""

    def __init__(self, device: int, host_pool_url: str) -> None:
        engine, region = open_engine("decode", device)
        self.pool = HostPool.create(rank=0, world_size=1, nbytes=POOL_BYTES, store_url=host_pool_url, device_id=device)
        pool = Region(self.pool.address, POOL_BYTES)
        self.host, self.device = Memory(10, None, pool.take), Memory(10, None, region.take)
        self.events = Events()
        self.puller = started_puller(
            epoch=EPOCH,
            layout=LAYOUT,
            memory=self.device.layer_memory(self.host),
            engine=engine,
            scratch_address=pool.take(64 * SOURCE_SCRATCH_BYTES),
            handshake_timeout_s=10.0,
            on_terminal=self.events.on_terminal,
            on_quiescent=self.events.quiescent.put,
        )

    def address(self) -> str:
        return self.puller.address

    def expect(self, request: str, generation: int, first: int) -> None:
        blocks = range(first, first + len(PREFILL_BLOCKS))
        self.puller.expect(request, generation, blocks, blocks, 1, wanted=range(len(blocks)), lease_s=60.0)

    def terminal(self) -> tuple[str, int, str | None]:
        return self.events.terminal.get(timeout=30)

    def release(self, request: str) -> str:
        self.puller.release(request)
        return self.events.quiescent.get(timeout=30)

    def equal(self, first: int) -> bool:
        """Whether blocks `first`... hold what prefill's seed says."""
        wanted = Memory(8, SEED)
        for layer in range(LAYOUT.num_layers):
            for index, (main, indexer) in enumerate(zip(PREFILL_BLOCKS, PREFILL_INDEXER, strict=True)):
                for kind in (CKV, K_ROPE):
                    if self.host.block(layer, kind, first + index) != wanted.block(layer, kind, main):
                        return False
                if layer in LAYOUT.indexer_layers:
                    got = self.device.block(layer, INDEXER_KEY, first + index)
                    if got != wanted.block(layer, INDEXER_KEY, indexer):
                        return False
        return True

    def counters(self) -> dict[str, int]:
        counters = self.puller.counters()
        return {name: getattr(counters, name) for name in counters.__slots__} | {"pending": self.puller.pending()}


def main(role: str, device: str, host_pool_url: str) -> None:
    peer = PrefillPeer(int(device)) if role == "prefill" else DecodePeer(int(device), host_pool_url)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(peer, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
