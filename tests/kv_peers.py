"""Both ends of a KV transfer in one process: a tiny layout, memory for each side, and an engine that copies at once."""

from __future__ import annotations

import ctypes
import queue
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sluice.v1 import registry_pb2, wire_pb2

from decode_node.pull_plan import LayerMemory, TensorMemory
from transfer.layout import block_bytes, kinds_of, kv_layout
from transfer.memfabric import Copies, Meanwhile

CKV, K_ROPE = wire_pb2.TENSOR_KIND_CKV, wire_pb2.TENSOR_KIND_K_ROPE
INDEXER_KEY = wire_pb2.TENSOR_KIND_INDEXER_KEY
SLOT_OF_LAYER = (0, 1, 1)
NUM_SLOTS = 2
EPOCH = "decode-epoch"


def small_layout(**changes: object) -> registry_pb2.KvLayout:
    """3 layers, of which 0 and 2 own an indexer."""
    fields: dict[str, object] = {
        "fingerprint": "tiny",
        "dtype": "float32",
        "block_size": 2,
        "num_layers": 3,
        "kv_lora_rank": 4,
        "rope_dim": 2,
        "index_dim": 3,
        "indexer_layers": [0, 2],
        "protocol": "sdma",
    }
    return kv_layout(**fields | changes)  # type: ignore[arg-type]


LAYOUT = small_layout()


class Memory:
    """Every layer's tensors as plain buffers (no sharing of slots, so that a test can compare afterwards).

    The content follows from `seed`; zeros without one. `allocate` returns the address of that many bytes.
    """

    def __init__(
        self, num_blocks: int, seed: int | str | None = None, allocate: Callable[[int], int] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.buffers: dict[tuple[int, int], ctypes.Array[ctypes.c_char]] = {}
        for layer in range(LAYOUT.num_layers):
            for kind in kinds_of(LAYOUT, layer):
                size = num_blocks * block_bytes(LAYOUT, kind)
                content = random.Random(f"{seed}/{layer}/{kind}").randbytes(size) if seed is not None else bytes(size)
                array = ctypes.c_char * size
                self.buffers[layer, kind] = array.from_address(allocate(size)) if allocate else array()
                self.buffers[layer, kind].raw = content

    def share_slots(self) -> Memory:
        """From now on the layers of a slot take turns in its tensors, as on prefill."""
        for layer, kind in sorted(self.buffers):
            first = SLOT_OF_LAYER.index(SLOT_OF_LAYER[layer])
            self.buffers[layer, kind] = self.buffers.get((first, kind), self.buffers[layer, kind])
        return self

    def copy_block(self, layer: int, kind: int, block: int, source: Memory, source_block: int) -> None:
        """As prefill's computation writes a block of KV."""
        size = block_bytes(LAYOUT, kind)
        content = source.block(layer, kind, source_block)
        ctypes.memmove(ctypes.addressof(self.buffers[layer, kind]) + block * size, content, size)

    def block(self, layer: int, kind: int, block: int) -> bytes:
        size = block_bytes(LAYOUT, kind)
        return self.buffers[layer, kind].raw[block * size : (block + 1) * size]

    def tensor(self, layer: int, kind: int) -> TensorMemory:
        return TensorMemory(ctypes.addressof(self.buffers[layer, kind]), block_bytes(LAYOUT, kind), self.num_blocks)

    def layer_memory(self, host: Memory | None = None) -> list[LayerMemory]:
        """As a decode rank's destination; main KV in ``host`` when ranks share it."""
        main = host or self
        return [
            LayerMemory(
                main.tensor(layer, CKV),
                main.tensor(layer, K_ROPE),
                self.tensor(layer, INDEXER_KEY) if layer in LAYOUT.indexer_layers else None,
            )
            for layer in range(LAYOUT.num_layers)
        ]

    def layer_layouts(self) -> list[wire_pb2.LayerLayout]:
        """As a prefill rank's source."""
        layouts = []
        for layer in range(LAYOUT.num_layers):
            described = wire_pb2.LayerLayout(layer=layer, slot=SLOT_OF_LAYER[layer])
            for kind in kinds_of(LAYOUT, layer):
                memory = self.tensor(layer, kind)
                described.tensors.add(
                    kind=kind, address=memory.address, block_bytes=memory.block_bytes, num_blocks=memory.num_blocks
                )
            layouts.append(described)
        return layouts


@dataclass(frozen=True)
class Stats:
    bytes: int
    descriptors_before: int
    descriptors_after: int


class LocalEngine:
    """``read`` is a memmove within this process. Hooks let a test delay it, fail it, or leave it in flight."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, list[int]]] = []  # session, sizes; the generation words' included
        self.before_read: Callable[[str, Sequence[int]], None] = lambda session, sizes: None
        self.after_read: Callable[[str, Sequence[int]], None] = lambda session, sizes: None
        self.busy: set[str] = set()
        self.forgotten: list[str] = []

    def read(
        self,
        session_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        then: Copies | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Stats:
        """What comes then is for the hooks and the record a read of its own."""
        sizes = copies.sizes
        self.before_read(session_id, sizes)
        self.reads.append((session_id, list(sizes)))
        for to, source, size in zip(*copies, strict=True):
            ctypes.memmove(to, source, size)
        if meanwhile is not None:
            meanwhile.work(time.monotonic())
        self.after_read(session_id, sizes)
        if then is not None:
            self.read(session_id, then, deadline_s=deadline_s)
        return Stats(sum(sizes), len(sizes), len(sizes))

    def idle(self, session_id: str) -> bool:
        return session_id not in self.busy

    def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)


@dataclass
class Events:
    """What a puller calls back."""

    terminal: queue.Queue[tuple[str, int, str | None]] = field(default_factory=queue.Queue)
    quiescent: queue.Queue[str] = field(default_factory=queue.Queue)

    def on_terminal(self, request_id: str, generation: int, error: str | None) -> None:
        self.terminal.put((request_id, generation, error))

    def next_terminal(self) -> tuple[str, int, str | None]:
        return self.terminal.get(timeout=10)


def entry(
    request: str, main: Sequence[int], start: int = 0, *, indexer: Sequence[int] = (), generation: int = 1
) -> wire_pb2.ReadEntry:
    return wire_pb2.ReadEntry(
        request_id=request,
        destination_generation=generation,
        main_start=start,
        main_blocks=main,
        indexer_start=start,
        indexer_blocks=indexer,
    )


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)
