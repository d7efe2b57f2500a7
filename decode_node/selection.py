"""What decides, per layer and pass, which cached rows tokens attend to, and where these lie in the hot rows."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from decode_node.memory import DecodeMemory, RowTables
from engine.indexer_cache import IndexerCache
from engine.model.attention import IndexerQuery
from engine.model.config import ModelConfig
from engine.ops.residency import Residency, ResidencyState, StepResidency


class Pass(NamedTuple):
    """Some consecutive new tokens of each of B requests, T in all."""

    rows: Tensor  # [B] int64 hot rows
    generations: Tensor  # [B] int64
    starts: Tensor  # [B] int64: position of each request's first new token
    stable_prefix: Tensor  # [B] int64: positions written by earlier steps, and confirmed
    visible: Tensor  # [B] int32: positions the request's last token sees, itself included
    query_ends: Tensor  # [B] int32, cumulative number of tokens
    most_tokens: int  # of one request
    request: Tensor  # [T] int64: of each token, 0 .. B - 1
    positions: Tensor  # [T] int64
    selects: bool  # whether layers with an indexer run it; else the picks of the pass before are used again


class Layout(NamedTuple):
    """Where a pass finds and puts main-KV rows in the hot buffer."""

    hot_table: Tensor  # [B, blocks of a hot row] int32, in order of logical slots
    tail_slots: Tensor  # [T] int64: slots of the whole buffer for the pass's own rows


class Selection(NamedTuple):
    """What an owning layer selected; layers that share it use it as it is, with their own caches.

    There is one at a time: the next owner's takes its memory.
    """

    topk_ids: Tensor  # [T, topk] int32 positions, padded with -1
    slots: Tensor  # [T, 1, topk] int32 logical hot slots of these
    miss_ids: Tensor  # [B, M] int32 positions to fetch
    miss_slots: Tensor  # [B, M] int32 logical hot slots they go to
    miss_counts: Tensor  # [B] int32
    hit_counts: Tensor  # [B] int32, places of the top-k that need no fetch


class Selector(Protocol):
    """Called in order: `begin` before each pass, then `select` or `again` once per layer that owns its picks."""

    def begin(self, given: Pass) -> Layout:
        """The layout of the pass for all its layers."""

    def select(self, layer: int, cache: IndexerCache, query: IndexerQuery) -> Selection:
        """The exact top-k of all positions each token sees; the keys of the pass's own have been written."""

    def again(self, layer: int, picks: Tensor) -> Selection:
        """Where the picks [T, topk] int32 lie; for passes that do not select."""


class LruSelector:
    """The plain indexer, and residency that evicts what has not been picked for longest.

    Slot s below `hot.tokens` of a row is a cache slot; the tail behind them holds the pass's own tokens, from the
    stable prefix on.
    """

    def __init__(self, model: ModelConfig, memory: DecodeMemory, tables: RowTables) -> None:
        self._topk, self._tables, self._hot = model.index_topk, tables, memory.geometry.hot
        hot = self._hot
        self._states = {layer: ResidencyState.empty(hot.rows, hot.tokens) for layer in model.indexer_layers}

    def begin(self, given: Pass) -> Layout:
        """See `Selector`."""
        self._pass = given
        self._table = self._tables.indexer[given.rows]
        found = Residency.empty(len(given.request), self._topk, len(given.rows), given.most_tokens)
        per_request = given.stable_prefix.int(), given.generations, given.rows.int(), given.query_ends
        self._residency = StepResidency(*per_request, found)
        self._slots = found.slots.unsqueeze(1)
        behind = given.positions - given.stable_prefix[given.request]
        tails = given.rows[given.request] * self._hot.stride + self._hot.tokens
        return Layout(self._tables.hot[given.rows], tails + behind)

    def select(self, layer: int, cache: IndexerCache, query: IndexerQuery) -> Selection:
        """See `Selector`."""
        given = self._pass
        return self.again(layer, cache.select(query, self._table, given.query_ends, given.visible, self._topk))

    def again(self, layer: int, picks: Tensor) -> Selection:
        """See `Selector`."""
        _, *fetches = self._residency(picks, self._states[layer])
        return Selection(picks, self._slots, *fetches)
