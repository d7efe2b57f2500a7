"""Prefill and decode ranks' ends of the transfers, of several groups, in one process: real sockets, threads and gates.

Prefill's layers take turns in its slots, so that a reader who is late finds another layer's bytes.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from sluice.v1 import worker_pb2

from decode_node import faults as decode_faults
from decode_node.batch_reader import SOURCE_SCRATCH_BYTES
from engine.config import FaultsSection
from prefill_node.block_sums import stamp_for
from prefill_node.generation import GenerationWords
from prefill_node.link import Endpoint, SourceInfo
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
    LocalEngine,
    Memory,
    entry,
    eventually,
)
from tests.started_puller import started_puller
from transfer import faults as transfer_faults
from transfer.layout import kinds_of

PREFILL_BLOCKS, INDEXER_BLOCKS = [7, 0, 3, 5, 2], [1, 6, 4, 0, 7]  # one prompt's, on prefill
MAIN, INDEXER = [2, 9, 4, 1, 8], [3, 5, 7, 6, 0]  # and on decode
Checksum = Literal["off", "sample", "all"]
NO_FAULTS = FaultsSection()


def content_of(request: str) -> Memory:
    """The KV of the request's prompt, by layer and block of the prompt."""
    return Memory(len(PREFILL_BLOCKS), seed=request)


class PrefillRank:
    def __init__(
        self, rank: int, tp: int, group: int, lease_s: float, faults: FaultsSection, checksum: Checksum
    ) -> None:
        self.worker_id = f"prefill-{group}/tp{rank}"
        self.memory = Memory(8).share_slots()
        self.words = GenerationWords(torch.zeros(NUM_SLOTS, dtype=torch.int64))
        self.gate = ReuseGate(NUM_SLOTS, self.words, save_grace_s=0.1)
        self.errors: queue.Queue[tuple[str, str]] = queue.Queue()
        source = SourceInfo(
            worker_id=self.worker_id,
            epoch="prefill-epoch",
            session_id=f"session-{group}-{rank}",
            tp_rank=rank,
            tp_size=tp,
            layout=LAYOUT,
            layers=self.memory.layer_layouts(),
            generation_address=self.words.address,
        )
        self.publisher = Publisher(
            source,
            self.gate,
            self.words,
            lease_s=lease_s,
            handshake_timeout_s=2.0,
            on_request_error=lambda request, text: self.errors.put((request, text)),
            stamp=stamp_for(checksum, source),
            outlet=transfer_faults.outlet(faults, self.worker_id),
        )
        self.publisher.start()

    def write(self, request: str, layer: int, start: int, end: int) -> None:
        """The chunk's KV of one layer, into the layer's slot."""
        content = content_of(request)
        for kind in kinds_of(LAYOUT, layer):
            blocks = INDEXER_BLOCKS if kind == INDEXER_KEY else PREFILL_BLOCKS
            for index in range(start, end):
                self.memory.copy_block(layer, kind, blocks[index], content, index)

    def run(self, endpoint: Endpoint, request: str, chunks: Sequence[tuple[int, int]]) -> None:
        """Writes and publishes a prompt chunk by chunk and layer by layer, as a forward pass would."""
        for start, end in chunks:
            for layer, slot in enumerate(SLOT_OF_LAYER):
                self.gate.wait(slot)
                self.write(request, layer, start, end)
                indexer = INDEXER_BLOCKS[start:end] if layer in LAYOUT.indexer_layers else []
                sent = entry(request, PREFILL_BLOCKS[start:end], start, indexer=indexer)
                last = end == len(PREFILL_BLOCKS) and layer == LAYOUT.num_layers - 1
                self.publisher.publish(layer, slot, endpoint, [sent], [request] if last else [])
        for slot in range(NUM_SLOTS):
            self.gate.wait(slot)


class DecodeRank:
    def __init__(self, rank: int, tp: int, group: int, host: Memory, contributors: int, faults: FaultsSection) -> None:
        self.memory = Memory(10)
        self.host = host
        self.engine = LocalEngine()
        self.events = Events()
        self.scratch = (ctypes.c_ubyte * (8 * SOURCE_SCRATCH_BYTES))()
        self._contributors = contributors
        worker_id = f"decode-{group}/dp0/tp{rank}"
        self.puller = started_puller(
            worker_id=worker_id,
            epoch=EPOCH,
            layout=LAYOUT,
            tp_rank=rank,
            tp_size=tp,
            memory=self.memory.layer_memory(host),
            engine=decode_faults.reader(self.engine, faults, worker_id),
            scratch_address=ctypes.addressof(self.scratch),
            on_terminal=self.events.on_terminal,
            on_quiescent=self.events.quiescent.put,
            max_sources=8,
            outlet=transfer_faults.outlet(faults, worker_id),
        )

    def expect(self, request: str, *, lease_s: float = 30.0) -> None:
        self.puller.expect(request, 1, MAIN, INDEXER, self._contributors, wanted=range(len(MAIN)), lease_s=lease_s)

    def release(self, request: str) -> None:
        self.puller.release(request)
        assert self.events.quiescent.get(timeout=10) == request


class TransferCluster:
    """`groups` prefill groups of `prefill_tp` ranks, `replicas` decode replicas of `decode_tp` ranks; all connected."""

    def __init__(
        self,
        prefill_tp: int = 4,
        decode_tp: int = 2,
        *,
        groups: int = 1,
        replicas: int = 1,
        lease_s: float = 30.0,
        faults: FaultsSection = NO_FAULTS,
        checksum: Checksum = "off",
    ) -> None:
        self.hosts = [Memory(10) for _ in range(replicas)]
        self.decode = [
            [DecodeRank(rank, decode_tp, group, host, prefill_tp // decode_tp, faults) for rank in range(decode_tp)]
            for group, host in enumerate(self.hosts)
        ]
        self.prefill = [
            [PrefillRank(rank, prefill_tp, group, lease_s, faults, checksum) for rank in range(prefill_tp)]
            for group in range(groups)
        ]
        self._threads = ThreadPoolExecutor(groups * prefill_tp)

    def destination(self, replica: int) -> worker_pb2.Destination:
        endpoints = [
            worker_pb2.ReadEndpoint(tp_rank=rank, address=node.puller.address, epoch=EPOCH)
            for rank, node in enumerate(self.decode[replica])
        ]
        return worker_pb2.Destination(group=f"decode-{replica}", tp_size=len(endpoints), endpoints=endpoints)

    def connect(self, group: int = 0, replica: int = 0) -> list[Endpoint]:
        """Where each rank of the group publishes. Raises TransferRefused."""
        destination = self.destination(replica)
        return list(self._threads.map(lambda node: node.publisher.connect(destination), self.prefill[group]))

    def run(
        self,
        request: str,
        chunks: Sequence[tuple[int, int]],
        group: int = 0,
        replica: int = 0,
        endpoints: Sequence[Endpoint] | None = None,
    ) -> None:
        """One prompt from a prefill group to a decode replica; returns when all of prefill's slots are free again."""
        ranks, endpoints = self.prefill[group], endpoints or self.connect(group, replica)
        list(self._threads.map(PrefillRank.run, ranks, endpoints, [request] * len(ranks), [chunks] * len(ranks)))

    def assert_complete(self, request: str, replica: int = 0) -> None:
        """Every byte of the prompt's KV is where the decode replica wants it."""
        content = content_of(request)
        for layer in range(LAYOUT.num_layers):
            for index, local in enumerate(MAIN):
                for kind in (CKV, K_ROPE):
                    assert self.hosts[replica].block(layer, kind, local) == content.block(layer, kind, index)
        for layer in LAYOUT.indexer_layers:
            for node in self.decode[replica]:
                for index, local in enumerate(INDEXER):
                    assert node.memory.block(layer, INDEXER_KEY, local) == content.block(layer, INDEXER_KEY, index)

    def assert_prefill_idle(self) -> None:
        for node in (node for group in self.prefill for node in group):
            assert node.gate.idle() and node.publisher.failure is None
            eventually(lambda node=node: node.publisher.outstanding() == 0)  # type: ignore[misc]

    def close(self) -> None:
        for prefill in (node for group in self.prefill for node in group):
            prefill.publisher.close()
        for decode in (node for group in self.decode for node in group):
            assert decode.puller.failure is None
            decode.puller.close()
        self._threads.shutdown()
