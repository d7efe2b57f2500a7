"""Publishers, gates and pullers of several TP ranks together, over real sockets and threads."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sluice.v1 import worker_pb2

from decode_node.puller import Puller
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
)

PREFILL_TP, DECODE_TP = 4, 2
PREFILL_BLOCKS, INDEXER_BLOCKS = [7, 0, 3, 5, 2], [1, 6, 4, 0, 7]  # one prompt's, on prefill
MAIN, INDEXER = [2, 9, 4, 1, 8], [3, 5, 7, 6, 0]  # and on decode


class PrefillRank:
    def __init__(self, rank: int, content: int, lease_s: float) -> None:
        self.memory = Memory(8, seed=content)
        self.words = GenerationWords(torch.zeros(NUM_SLOTS, dtype=torch.int64))
        self.gate = ReuseGate(NUM_SLOTS, self.words, save_grace_s=0.1)
        self.errors: queue.Queue[tuple[str, str]] = queue.Queue()
        source = SourceInfo(
            worker_id=f"prefill-0/tp{rank}",
            epoch="prefill-epoch",
            session_id=f"session-{rank}",
            tp_rank=rank,
            tp_size=PREFILL_TP,
            layout=LAYOUT,
            layers=self.memory.layer_layouts(),
            generation_address=self.words.address,
        )
        self.publisher = Publisher(
            source,
            self.gate,
            self.words,
            lease_s=lease_s,
            handshake_timeout_s=5.0,
            on_request_error=lambda request, text: self.errors.put((request, text)),
        )
        self.publisher.start()

    def run(self, endpoint: Endpoint, request: str, chunks: Sequence[tuple[int, int]]) -> None:
        """Publishes a prompt chunk by chunk and layer by layer, as a forward pass would; waits for every slot."""
        for start, end in chunks:
            for layer, slot in enumerate(SLOT_OF_LAYER):
                self.gate.wait(slot)
                indexer = INDEXER_BLOCKS[start:end] if layer in LAYOUT.indexer_layers else []
                sent = entry(request, PREFILL_BLOCKS[start:end], start, indexer=indexer)
                last = end == len(PREFILL_BLOCKS) and layer == LAYOUT.num_layers - 1
                self.publisher.publish(layer, slot, endpoint, [sent], [request] if last else [])
        for slot in range(NUM_SLOTS):
            self.gate.wait(slot)


class DecodeRank:
    def __init__(self, rank: int, host: Memory) -> None:
        self.memory = Memory(10)
        self.engine = LocalEngine()
        self.events = Events()
        self.scratch = (ctypes.c_uint64 * 8)()
        self.puller = Puller(
            bind="tcp://127.0.0.1:*",
            worker_id=f"decode-0/dp0/tp{rank}",
            epoch=EPOCH,
            layout=LAYOUT,
            tp_rank=rank,
            tp_size=DECODE_TP,
            memory=self.memory.layer_memory(host),
            engine=self.engine,
            scratch_address=ctypes.addressof(self.scratch),
            read_timeout_s=5.0,
            handshake_timeout_s=5.0,
            on_terminal=self.events.on_terminal,
            on_quiescent=self.events.quiescent.put,
            max_sources=8,
        )
        self.puller.start()

    def expect(self, request: str) -> None:
        self.puller.expect(request, 1, MAIN, INDEXER, PREFILL_TP // DECODE_TP, wanted=range(len(MAIN)), lease_s=30.0)


class Cluster:
    def __init__(self, lease_s: float = 30.0) -> None:
        self.host = Memory(10)
        self.decode = [DecodeRank(rank, self.host) for rank in range(DECODE_TP)]
        self.prefill = [PrefillRank(rank, content=5, lease_s=lease_s) for rank in range(PREFILL_TP)]
        endpoints = [
            worker_pb2.ReadEndpoint(tp_rank=rank, address=node.puller.address, epoch=EPOCH)
            for rank, node in enumerate(self.decode)
        ]
        destination = worker_pb2.Destination(group="decode-0", tp_size=DECODE_TP, endpoints=endpoints)
        self.threads = ThreadPoolExecutor(PREFILL_TP)
        self.endpoints = list(self.threads.map(lambda node: node.publisher.connect(destination), self.prefill))

    def run(self, request: str, chunks: Sequence[tuple[int, int]]) -> None:
        list(self.threads.map(PrefillRank.run, self.prefill, self.endpoints, [request] * 4, [chunks] * 4))

    def close(self) -> None:
        for prefill in self.prefill:
            prefill.publisher.close()
        for decode in self.decode:
            decode.puller.close()
        self.threads.shutdown()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def assert_complete(cluster: Cluster) -> None:
    source = cluster.prefill[0].memory
    for layer in range(LAYOUT.num_layers):
        for remote, local in zip(PREFILL_BLOCKS, MAIN, strict=True):
            for kind in (CKV, K_ROPE):
                assert cluster.host.block(layer, kind, local) == source.block(layer, kind, remote)
    for layer in LAYOUT.indexer_layers:
        for node in cluster.decode:
            for remote, local in zip(INDEXER_BLOCKS, INDEXER, strict=True):
                assert node.memory.block(layer, INDEXER_KEY, local) == source.block(layer, INDEXER_KEY, remote)


@pytest.mark.parametrize("chunks", [[(0, 5)], [(0, 2), (2, 5)], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]])
def test_four_prefill_ranks_fill_two_decode_ranks_with_every_byte_once(
    cluster: Cluster, chunks: list[tuple[int, int]]
) -> None:
    for node in cluster.decode:
        node.expect("r")
    cluster.run("r", chunks)
    for node in cluster.decode:
        assert node.events.next_terminal() == ("r", 1, None)
    assert_complete(cluster)
    main_bytes = len(MAIN) * sum(
        len(cluster.host.block(layer, kind, 0)) for layer in range(3) for kind in (CKV, K_ROPE)
    )
    indexer_bytes = len(MAIN) * 2 * len(cluster.decode[0].memory.block(0, INDEXER_KEY, 0))
    assert sum(node.puller.counters().bytes_pulled for node in cluster.decode) == main_bytes + 2 * indexer_bytes
    for prefill in cluster.prefill:
        assert prefill.gate.idle() and prefill.publisher.outstanding() == 0 and prefill.errors.empty()
    for node in cluster.decode:
        node.puller.release("r")
        assert node.events.quiescent.get(timeout=5) == "r"
        assert node.puller.pending() == 0


def test_a_reader_past_its_lease_discards_what_prefill_overwrote() -> None:
    cluster = Cluster(lease_s=0.3)
    for node in cluster.decode:
        node.expect("r")
    slow, prefill = cluster.decode[0].engine, cluster.prefill[0]
    overwritten = threading.Event()

    def stall(session: str, sizes: Sequence[int]) -> None:
        if session == "session-0" and sizes != [8]:
            assert overwritten.wait(10)

    slow.before_read = stall
    sent = entry("r", PREFILL_BLOCKS)
    prefill.publisher.publish(1, 1, cluster.endpoints[0], [sent])
    (failure,) = prefill.gate.wait(1)  # opens after the lease, not when the reader likes
    assert "lease" in failure.reason
    for kind in (CKV, K_ROPE):
        ctypes.memset(prefill.memory.buffers[1, kind], 0xEE, len(prefill.memory.buffers[1, kind]))
    overwritten.set()
    assert "reused slot 1" in (cluster.decode[0].events.next_terminal()[2] or "")
    assert cluster.decode[0].puller.counters().stale_generation == 1
    assert "lease" in prefill.errors.get(timeout=5)[1]
    cluster.close()


def test_a_killed_decode_rank_leaves_the_gates_and_the_other_rank_working(cluster: Cluster) -> None:
    for node in cluster.decode:
        node.expect("r")
    cluster.decode[0].puller.close()
    cluster.run("r", [(0, 2), (2, 5)])  # ends, although nobody acknowledges
    assert cluster.decode[1].events.next_terminal() == ("r", 1, None)
    for prefill in cluster.prefill[:2]:
        assert "connection" in prefill.errors.get(timeout=5)[1]
        assert prefill.gate.idle() and prefill.publisher.outstanding() == 0
    assert cluster.prefill[2].errors.empty() and cluster.prefill[3].errors.empty()


def test_a_killed_prefill_rank_fails_the_request_on_its_decode_rank_only(cluster: Cluster) -> None:
    for node in cluster.decode:
        node.expect("r")
    dying = cluster.prefill[1]
    dying.publisher.publish(0, 0, cluster.endpoints[1], [entry("r", PREFILL_BLOCKS[:2], indexer=INDEXER_BLOCKS[:2])])
    dying.gate.wait(0)
    dying.publisher.close()
    assert "prefill-0/tp1" in (cluster.decode[0].events.next_terminal()[2] or "")
    for rank in (2, 3):
        cluster.prefill[rank].run(cluster.endpoints[rank], "r", [(0, 5)])
    assert cluster.decode[1].events.next_terminal() == ("r", 1, None)
