"""How much KV memory each request of a DP rank holds, who may enter, and who grows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from decode_node.geometry import DecodeGeometry
from engine.kv_cache import CacheSpec, KVCacheManager, Usage

MAIN, INDEXER, HOT_ROWS = "main", "indexer", "hot_rows"


def kv_manager(geometry: DecodeGeometry) -> KVCacheManager:
    """Accounting of the three regions a request needs; a hot row is one block that is long enough for any request."""
    return KVCacheManager(
        {
            MAIN: CacheSpec(geometry.block_size, geometry.num_blocks),
            INDEXER: CacheSpec(geometry.block_size, geometry.num_blocks),
            HOT_ROWS: CacheSpec(geometry.max_request_tokens, geometry.hot.rows),
        }
    )


class Need(NamedTuple):
    """Tokens of one request: `now` to hold, `most` it can ever hold."""

    request_id: str
    now: int
    most: int


class NewBlocks(NamedTuple):
    """Blocks that follow the ones a request holds: the first is its `start`-th, in both caches."""

    start: int
    main: tuple[int, ...]
    indexer: tuple[int, ...]


class KvRoom:
    """Memory grows with the sequence, so more requests fit than would if each held room for its longest answer.

    Invariants:
    * all or nothing: growing and entering take blocks in every cache, or none.
    * headroom (test_a_request_enters_only_with_headroom_for_everyone): a request enters only if it and all that are in
      could each take `headroom_tokens` more (never more than their `most`). So who enters does not push anybody out at
      once, and who was pushed out does not come back too early.
    * a request that could enter an empty node can, alone, always grow to its `most`.
    """

    def __init__(self, kv: KVCacheManager, headroom_tokens: int) -> None:
        self._kv = kv
        self._headroom = headroom_tokens

    def usage(self) -> Mapping[str, Usage]:
        return self._kv.usage()

    def can_enter(self, need: Need, inside: Iterable[Need]) -> bool:
        """Whether a request that holds nothing fits, next to the ones `inside`."""
        return self._kv.can_allocate_together(
            {one.request_id: min(one.most, one.now + self._headroom) for one in (*inside, need)}
        )

    def enter(self, need: Need) -> dict[str, list[int]]:
        """Takes what the request needs now; its blocks by cache. Only after `can_enter`."""
        self._kv.allocate(need.request_id, need.now)
        return self._kv.blocks(need.request_id)

    def can_grow(self, need: Need, leaving: Collection[str]) -> bool:
        """Whether the request has or can take what it needs now, once the requests `leaving` are out."""
        return self._kv.can_allocate(need.request_id, need.now, without=leaving)

    def grow(self, need: Need) -> NewBlocks:
        """Takes what the request needs now and does not hold yet. Only if `can_grow` with nobody leaving."""
        start = len(self._kv.blocks(need.request_id)[MAIN])
        self._kv.allocate(need.request_id, need.now)
        blocks = self._kv.blocks(need.request_id)
        return NewBlocks(start, tuple(blocks[MAIN][start:]), tuple(blocks[INDEXER][start:]))

    def leave(self, request_id: str) -> None:
        """Gives everything back."""
        self._kv.free(request_id)
