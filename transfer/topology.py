"""Which prefill rank gives what to which decode rank. Pure arithmetic, used by both sides so that they agree.

With multi-head latent attention every prefill TP rank holds the same KV, and so does every decode TP rank. A prefill
rank talks to exactly one decode rank; a decode rank has ``prefill_tp / decode_tp`` *contributors*: members 0, 1, ...
"""

from __future__ import annotations

from typing import NamedTuple

from sluice.v1 import worker_pb2


class Contributor(NamedTuple):
    """The part a prefill rank plays: member ``member`` of the ``members`` contributors of ``decode_rank``."""

    decode_rank: int
    member: int
    members: int


def contributor_of(prefill_rank: int, prefill_tp: int, decode_tp: int) -> Contributor:
    """The part of ``prefill_rank`` when ``prefill_tp`` ranks feed ``decode_tp`` ranks.

    Raises ValueError when decode_tp does not divide prefill_tp or the rank is not one of prefill's.
    """
    if prefill_tp < 1 or decode_tp < 1 or prefill_tp % decode_tp:
        raise ValueError(f"prefill TP {prefill_tp} must be a positive multiple of decode TP {decode_tp}")
    if not 0 <= prefill_rank < prefill_tp:
        raise ValueError(f"prefill rank {prefill_rank} is not one of the {prefill_tp} TP ranks 0..{prefill_tp - 1}")
    members = prefill_tp // decode_tp
    return Contributor(prefill_rank // members, prefill_rank % members, members)


def tp_block_range(count: int, rank: int, size: int, start: int) -> range:
    """The share of ``rank`` in ``count`` consecutive blocks split over ``size`` ranks: offsets within 0..count.

    The shares of all ranks are contiguous, disjoint and cover everything; the larger ones come first. ``start``, the
    request's index of the first block, rotates who comes first, so that a stream of short batches loads all ranks
    alike. Raises ValueError on a negative count or start or a rank outside 0..size-1.
    """
    if count < 0 or start < 0 or not 0 <= rank < size:
        raise ValueError(f"no share for rank {rank} of {size} in {count} blocks from block {start}")
    place = (rank - start) % size
    share, larger = divmod(count, size)
    first = place * share + min(place, larger)
    return range(first, first + share + (place < larger))


def main_share(count: int, start: int, decode_rank: int, decode_tp: int, member: int) -> range:
    """Which of an announcement's ``count`` main-KV blocks a decode rank reads from its contributor ``member``.

    The ranks of a decode replica share one host pool, so each reads a part, and all of it from member 0.
    ``start``: the request's index of the first block.
    """
    return tp_block_range(count, decode_rank, decode_tp, start) if member == 0 else range(0)


def indexer_share(count: int, start: int, member: int, members: int) -> range:
    """Which of an announcement's ``count`` indexer blocks a decode rank reads from its contributor ``member``.

    Each rank needs all of them, and reads a part from each contributor.
    """
    return tp_block_range(count, member, members, start)


def endpoint_of(destination: worker_pb2.Destination, prefill_rank: int, prefill_tp: int) -> worker_pb2.ReadEndpoint:
    """Where ``prefill_rank`` publishes for this destination.

    Raises ValueError when the destination does not list one endpoint per TP rank in rank order, or its TP size does not
    divide prefill's.
    """
    ranks = [endpoint.tp_rank for endpoint in destination.endpoints]
    if ranks != list(range(destination.tp_size)):
        raise ValueError(
            f"destination of request {destination.request_id!r} in {destination.group}: endpoints of TP ranks {ranks}, "
            f"but its TP size {destination.tp_size} needs one for each rank in order"
        )
    return destination.endpoints[contributor_of(prefill_rank, prefill_tp, destination.tp_size).decode_rank]
