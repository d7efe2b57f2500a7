"""Every topology with prefill TP a multiple of decode TP moves every byte once, between any groups, side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kv_peers import CKV, INDEXER_KEY, K_ROPE, LAYOUT
from tests.transfer_cluster import MAIN, TransferCluster

CHUNKS = [(0, 1), (1, 4), (4, 5)]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (4, 2), (4, 1), (3, 1), (2, 2), (6, 3)])
def test_unequal_tp_moves_every_byte_once(prefill_tp: int, decode_tp: int) -> None:
    """Also a contributor whose share is empty acknowledges, and the one with main KV is not waited for alone."""
    cluster = TransferCluster(prefill_tp, decode_tp)
    for node in cluster.decode[0]:
        node.expect("r")
    cluster.run("r", CHUNKS)
    for node in cluster.decode[0]:
        assert node.events.next_terminal() == ("r", 1, None)
        node.release("r")
        assert node.puller.pending() == 0
    cluster.assert_complete("r")
    host, device = cluster.hosts[0], cluster.decode[0][0].memory
    main = sum(len(host.block(layer, kind, 0)) for layer in range(LAYOUT.num_layers) for kind in (CKV, K_ROPE))
    keys = sum(len(device.block(layer, INDEXER_KEY, 0)) for layer in LAYOUT.indexer_layers)
    pulled = sum(node.puller.counters().bytes_pulled for node in cluster.decode[0])
    assert pulled == len(MAIN) * (main + decode_tp * keys), "main KV once per replica, index keys once per rank"
    for prefill in cluster.prefill[0]:
        assert prefill.publisher.counters().acks == len(CHUNKS) * LAYOUT.num_layers
        assert prefill.errors.empty()
    cluster.assert_prefill_idle()
    cluster.close()


def test_several_prefill_groups_and_several_decode_replicas_feed_each_other_at_once() -> None:
    cluster = TransferCluster(2, 1, groups=3, replicas=2)
    with ThreadPoolExecutor(3) as threads:
        for first in range(3):  # every group serves every replica, two of them at the same time
            routes = [(group, (group + first) % 2) for group in range(3)]
            for turn in (routes[:2], routes[2:]):
                for group, replica in turn:
                    cluster.decode[replica][0].expect(f"r{first}{group}")
                list(
                    threads.map(
                        lambda route, first=first: cluster.run(f"r{first}{route[0]}", CHUNKS, *route),  # type: ignore[misc]
                        turn,
                    )
                )
                for group, replica in turn:
                    (node,) = cluster.decode[replica]
                    assert node.events.next_terminal() == (f"r{first}{group}", 1, None)
                    cluster.assert_complete(f"r{first}{group}", replica)
                    node.release(f"r{first}{group}")
    cluster.assert_prefill_idle()
    cluster.close()
