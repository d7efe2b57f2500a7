"""Which rank reads what: shares are disjoint, complete and rotate; unequal TP maps ranks to contributors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice.v1 import worker_pb2

from transfer.topology import Contributor, contributor_of, endpoint_of, tp_block_range


@given(st.integers(0, 200), st.integers(1, 16), st.integers(0, 1000))
def test_shares_are_disjoint_contiguous_and_complete(count: int, size: int, start: int) -> None:
    shares = [tp_block_range(count, rank, size, start) for rank in range(size)]
    assert sorted(block for share in shares for block in share) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_larger_shares_come_first() -> None:
    assert [tp_block_range(5, rank, 2, 0) for rank in range(2)] == [range(3), range(3, 5)]
    assert [tp_block_range(7, rank, 4, 0) for rank in range(4)] == [range(2), range(2, 4), range(4, 6), range(6, 7)]


def test_single_blocks_go_round_the_ranks() -> None:
    takers = [next(rank for rank in range(4) if tp_block_range(1, rank, 4, start)) for start in range(8)]
    assert takers == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [(-1, 0, 1, 0), (1, 2, 2, 0), (1, -1, 2, 0), (1, 0, 1, -1)])
def test_impossible_shares_are_refused(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="no share"):
        tp_block_range(*wrong)


def test_four_prefill_ranks_feed_two_decode_ranks() -> None:
    assert [contributor_of(rank, 4, 2) for rank in range(4)] == [
        Contributor(0, 0, 2),
        Contributor(0, 1, 2),
        Contributor(1, 0, 2),
        Contributor(1, 1, 2),
    ]


@pytest.mark.parametrize(("rank", "prefill", "decode"), [(0, 3, 2), (0, 1, 2), (2, 2, 1), (-1, 2, 1), (0, 2, 0)])
def test_impossible_topologies_are_refused(rank: int, prefill: int, decode: int) -> None:
    with pytest.raises(ValueError, match="prefill"):
        contributor_of(rank, prefill, decode)


def test_endpoint_of_a_rank() -> None:
    endpoints = [worker_pb2.ReadEndpoint(tp_rank=rank, address=f"tcp://d:{rank}") for rank in range(2)]
    destination = worker_pb2.Destination(request_id="r", group="decode-0", tp_size=2, endpoints=endpoints)
    assert [endpoint_of(destination, rank, 4).address for rank in range(4)] == ["tcp://d:0"] * 2 + ["tcp://d:1"] * 2
    del destination.endpoints[0]
    with pytest.raises(ValueError, match=r"'r' in decode-0.*\[1\].*TP size 2"):
        endpoint_of(destination, 0, 4)
