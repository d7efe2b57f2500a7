"""Publishers, gates and pullers of several TP ranks together, over real sockets and threads."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator, Sequence

import pytest

from tests.kv_peers import CKV, INDEXER_KEY, K_ROPE, entry
from tests.transfer_cluster import INDEXER_BLOCKS, MAIN, PREFILL_BLOCKS, TransferCluster


@pytest.fixture
def cluster() -> Iterator[TransferCluster]:
    cluster = TransferCluster()
    yield cluster
    cluster.close()


@pytest.mark.parametrize("chunks", [[(0, 5)], [(0, 2), (2, 5)], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]])
def test_four_prefill_ranks_fill_two_decode_ranks_with_every_byte_once(
    cluster: TransferCluster, chunks: list[tuple[int, int]]
) -> None:
    for node in cluster.decode[0]:
        node.expect("r")
    cluster.run("r", chunks)
    for node in cluster.decode[0]:
        assert node.events.next_terminal() == ("r", 1, None)
    cluster.assert_complete("r")
    main_bytes = len(MAIN) * sum(
        len(cluster.hosts[0].block(layer, kind, 0)) for layer in range(3) for kind in (CKV, K_ROPE)
    )
    indexer_bytes = len(MAIN) * 2 * len(cluster.decode[0][0].memory.block(0, INDEXER_KEY, 0))
    assert sum(node.puller.counters().bytes_pulled for node in cluster.decode[0]) == main_bytes + 2 * indexer_bytes
    cluster.assert_prefill_idle()
    assert all(prefill.errors.empty() for prefill in cluster.prefill[0])
    for node in cluster.decode[0]:
        node.release("r")
        assert node.puller.pending() == 0


def test_a_reader_past_its_lease_discards_what_prefill_overwrote() -> None:
    cluster = TransferCluster(lease_s=0.3)
    for node in cluster.decode[0]:
        node.expect("r")
    slow, prefill = cluster.decode[0][0].engine, cluster.prefill[0][0]
    overwritten = threading.Event()

    def stall(session: str, sizes: Sequence[int]) -> None:
        if session == "session-0-0" and 8 not in sizes:
            assert overwritten.wait(10)

    slow.before_read = stall
    sent = entry("r", PREFILL_BLOCKS)
    prefill.publisher.publish(1, 1, cluster.connect()[0], [sent])
    (failure,) = prefill.gate.wait(1)  # opens after the lease, not when the reader likes
    assert "lease" in failure.reason
    for kind in (CKV, K_ROPE):
        ctypes.memset(prefill.memory.buffers[1, kind], 0xEE, len(prefill.memory.buffers[1, kind]))
    overwritten.set()
    assert "reused slot 1" in (cluster.decode[0][0].events.next_terminal()[2] or "")
    assert cluster.decode[0][0].puller.counters().stale_generation == 1
    assert re.search("lease|reused slot 1", prefill.errors.get(timeout=5)[1])  # whichever side says it first
    cluster.close()


def test_a_killed_decode_rank_leaves_the_gates_and_the_other_rank_working(cluster: TransferCluster) -> None:
    for node in cluster.decode[0]:
        node.expect("r")
    endpoints = cluster.connect()
    cluster.decode[0][0].puller.close()
    cluster.run("r", [(0, 2), (2, 5)], endpoints=endpoints)  # ends, although nobody acknowledges
    assert cluster.decode[0][1].events.next_terminal() == ("r", 1, None)
    for prefill in cluster.prefill[0][:2]:
        assert "connection" in prefill.errors.get(timeout=5)[1]
        assert prefill.gate.idle() and prefill.publisher.outstanding() == 0
    assert cluster.prefill[0][2].errors.empty() and cluster.prefill[0][3].errors.empty()


def test_a_killed_prefill_rank_fails_the_request_on_its_decode_rank_only(cluster: TransferCluster) -> None:
    for node in cluster.decode[0]:
        node.expect("r")
    dying, endpoints = cluster.prefill[0][1], cluster.connect()
    dying.publisher.publish(0, 0, endpoints[1], [entry("r", PREFILL_BLOCKS[:2], indexer=INDEXER_BLOCKS[:2])])
    dying.gate.wait(0)
    dying.publisher.close()
    assert "prefill-0/tp1" in (cluster.decode[0][0].events.next_terminal()[2] or "")
    for rank in (2, 3):
        cluster.prefill[0][rank].run(endpoints[rank], "r", [(0, 5)])
    assert cluster.decode[0][1].events.next_terminal() == ("r", 1, None)
