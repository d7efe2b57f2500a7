"""One end of a pull as it is in a deployment: ``python -m benchmarks.transfer_layers prefill|decode DEVICE CHECKSUM``.

The real publisher and puller over the wheel, with the row sizes of DeepSeek-V3.2 in bfloat16: in each of 61 layers 16
blocks, each of 128 KiB of latent rows and 16 KiB of rope keys, and no indexer. See child.py.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import time
from typing import Any, Literal, cast

import torch
from sluice.v1 import wire_pb2, worker_pb2

from benchmarks.child import serve
from benchmarks.transfer_child import PlainCopy
from benchmarks.transfer_shapes import BLOCKS, LAYERS, layers_in_order
from decode_node.pull_plan import LayerMemory, TensorMemory
from decode_node.puller import Puller
from prefill_node.block_sums import stamp_for
from prefill_node.generation import GenerationWords
from prefill_node.link import Endpoint, SourceInfo
from prefill_node.publisher import Publisher
from prefill_node.reuse_gate import ReuseGate
from transfer.hostcann.runtime import malloc
from transfer.layout import MAIN_KINDS, block_bytes, kv_layout
from transfer.memfabric import MemFabricEngine

LAYOUT = kv_layout(
    fingerprint="bench",
    dtype="bfloat16",
    block_size=128,
    num_layers=LAYERS,
    kv_lora_rank=512,
    rope_dim=64,
    index_dim=128,
    indexer_layers=[],
    protocol="sdma",
)
BYTES = LAYERS * BLOCKS * sum(block_bytes(LAYOUT, kind) for kind in MAIN_KINDS)
_EPOCH = "bench"
_PAGE = 2 << 20
_S = 30.0


def open_engine(role: Literal["prefill", "decode"], device: int) -> tuple[MemFabricEngine, int]:
    """The engine, and the address of `BYTES` bytes and one page of registered memory."""
    engine = MemFabricEngine(host="127.0.0.1", device_id=device, role=role, protocol="sdma", store_url="")
    nbytes = -(-BYTES // _PAGE) * _PAGE + _PAGE
    address = malloc(device, nbytes)
    engine.register(address, nbytes)
    return engine, address


def tensors(address: int) -> list[list[TensorMemory]]:
    """Of each layer ckv and k_rope, one behind the other from `address` on."""
    layers = []
    for _ in range(LAYERS):
        layer = []
        for kind in MAIN_KINDS:
            layer.append(TensorMemory(address, block_bytes(LAYOUT, kind), BLOCKS))
            address += BLOCKS * block_bytes(LAYOUT, kind)
        layers.append(layer)
    return layers


class Prefill:
    """Publishes; every layer has a slot of its own."""

    def __init__(self, device: int, checksum: str) -> None:
        self._engine, address = open_engine("prefill", device)
        session = self._engine.session_id
        content = torch.frombuffer((ctypes.c_uint8 * BYTES).from_address(address), dtype=torch.uint8)
        content.copy_(torch.randint(0, 256, (BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
        words = (ctypes.c_int64 * LAYERS).from_address(address + -(-BYTES // _PAGE) * _PAGE)
        self._words = GenerationWords(torch.frombuffer(words, dtype=torch.int64))
        self._gate = ReuseGate(LAYERS, self._words, save_grace_s=_S)
        self._errors: queue.SimpleQueue[str] = queue.SimpleQueue()
        layouts = []
        for layer, parts in enumerate(tensors(address)):
            described = wire_pb2.LayerLayout(layer=layer, slot=layer)
            for kind, part in zip(MAIN_KINDS, parts, strict=True):
                described.tensors.add(
                    kind=kind, address=part.address, block_bytes=part.block_bytes, num_blocks=part.num_blocks
                )
            layouts.append(described)
        source = SourceInfo("prefill-0/tp0", session, session, 0, 1, LAYOUT, layouts, self._words.address)
        self._publisher = Publisher(
            source,
            self._gate,
            self._words,
            lease_s=_S,
            handshake_timeout_s=_S,
            on_request_error=lambda request, text: self._errors.put(text),
            stamp=stamp_for(cast(Any, checksum), source),
        )
        self._publisher.start()
        self._endpoint: Endpoint | None = None

    def connect(self, address: str) -> None:
        endpoint = worker_pb2.ReadEndpoint(address=address, epoch=_EPOCH)
        self._endpoint = self._publisher.connect(
            worker_pb2.Destination(group="decode-0", tp_size=1, endpoints=[endpoint])
        )

    def pull(self, request: str, generation: int, ahead: int) -> list[float]:
        """Seconds of all layers, each published when the gate of the layer `ahead` before it is open, and of each one.

        What one layer takes is from its announcement until its gate is open; with `ahead` > 1 that holds waiting too.
        """
        if self._endpoint is None:
            raise RuntimeError("not connected")
        began: list[float] = []
        seconds = []
        start = time.perf_counter()
        for layer in range(LAYERS + ahead):
            if layer >= ahead:
                self._gate.wait(layer - ahead)
                seconds.append(time.perf_counter() - began[layer - ahead])
            if layer < LAYERS:
                entry = wire_pb2.ReadEntry(
                    request_id=request, destination_generation=generation, main_blocks=range(BLOCKS)
                )
                began.append(time.perf_counter())
                last = [request] if layer == LAYERS - 1 else []
                self._publisher.publish(layer, layer, self._endpoint, [entry], last)
        whole = time.perf_counter() - start
        if not self._errors.empty():
            raise RuntimeError(self._errors.get())
        return [whole, *seconds]


class Decode:
    """Receives; checks the bytes of the last request when asked."""

    def __init__(self, device: int, checksum: str) -> None:
        engine, self._memory = open_engine("decode", device)
        self._ended: queue.Queue[str | None] = queue.Queue()
        self._free: queue.Queue[str] = queue.Queue()
        self._puller = Puller(
            bind="tcp://127.0.0.1:*",
            worker_id="decode-0/dp0/tp0",
            epoch=_EPOCH,
            layout=LAYOUT,
            tp_rank=0,
            tp_size=1,
            memory=[LayerMemory(ckv, k_rope) for ckv, k_rope in tensors(self._memory)],
            engine=engine,
            scratch_address=self._memory + -(-BYTES // _PAGE) * _PAGE,
            read_timeout_s=_S / 2,
            read_retries=0,
            handshake_timeout_s=_S,
            on_terminal=lambda request, generation, error: self._ended.put(error),
            on_quiescent=self._free.put,
        )
        self._puller.start()
        self._plain = PlainCopy().of(layers_in_order())

    def address(self) -> str:
        return self._puller.address

    def expect(self, request: str, generation: int) -> None:
        blocks = range(BLOCKS)
        self._puller.expect(request, generation, blocks, (), 1, wanted=blocks, lease_s=_S)

    def receive(self, request: str) -> None:
        """Waits for the end of an expected request and frees its blocks."""
        if error := self._ended.get(timeout=_S):
            raise RuntimeError(error)
        self._puller.release(request)
        self._free.get(timeout=_S)

    def memcpy(self) -> float:
        """Seconds for the same copies by memcpy between two regions of this process."""
        start = time.perf_counter()
        self._plain(0)
        return time.perf_counter() - start

    def right(self) -> bool:
        got = torch.frombuffer((ctypes.c_uint8 * BYTES).from_address(self._memory), dtype=torch.uint8)
        sent = torch.randint(0, 256, (BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        return bool(torch.equal(got, sent))


def main(role: str, device: str, checksum: str) -> None:
    """Entry point."""
    serve(Prefill(int(device), checksum) if role == "prefill" else Decode(int(device), checksum))


if __name__ == "__main__":
    main(*sys.argv[1:])
