"""Decode attention over the hot buffer: attends exactly the indexer's top-k, however small the buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from decode_node.lim_selector import LimSelector
from decode_node.memory import DecodeMemory, RowTables
from decode_node.selection import LruSelector, Pass, Selection, Selector
from engine.model.attention import IndexerQuery
from engine.model.config import ModelConfig
from engine.ops.copy_sfa import StepCopyAttention

SELECTORS: dict[str, type[LruSelector] | type[LimSelector]] = {"residency": LruSelector, "lim": LimSelector}
"""By `decode.selection`."""


class _Step(NamedTuple):
    """What all layers of a pass share. T tokens."""

    host_slots: Tensor  # [T] int64: where the new main-KV rows go in the host pool
    index_slots: Tensor  # [T] int64: where the new indexer keys go
    tail_slots: Tensor  # [T] int64: where the new main-KV rows go in the hot buffer
    picks: Tensor | None  # [T, topk] int32: what tokens attend to whose layer selects nothing itself
    attention: StepCopyAttention


class _Rows(NamedTuple):
    """One layer's main KV as rows, [any, L] and [any, R]."""

    ckv: Tensor
    k_rope: Tensor


@dataclass
class HotCounters:
    """Monotonic, summed over layers and tokens; written by the engine thread only."""

    hits: int = 0
    misses: int = 0  # a row that several tokens of a request need is fetched once, and a hit for the others
    bytes_host_to_device: int = 0


class DecodeBackend:
    """AttentionBackend of a decode rank. Per layer and step, for each request:

    1. the new main-KV rows go to the tail of its hot row and, written by one rank only, to the host pool;
    2. the new indexer keys go to the indexer cache; for each token the lightning indexer picks the top-k of all
       positions it sees;
    3. residency, or LIM along with 2, says which picked rows are in the hot row and which slots the missing ones get
       (`decode_node.selection.Selector`);
    4. Copy-SFA fetches these from the host pool and attends over exactly the picked slots.

    A layer without an indexer skips 2 and 3: hot rows have one layout in all layers, so the owner's picks, slots and
    misses are right for its caches too, if it makes the same copies in every step (it does).

    Invariant "only misses move" (test_bytes_copied_per_step_are_misses_times_row_bytes): what attention copies from the
    host is the rows the selection missed, each once.

    Invariant "sealed prefix" (test_sealed_prefix): a hot slot counts as a hit only for the same request generation,
    and only for confirmed positions that earlier steps wrote; the step's own tokens are always read from the tail. So a
    drafted token that proves wrong leaves nothing behind: its rows are written anew, in the host pool too, before its
    position is sealed (test_rollback_never_leaves_a_wrong_row_resident).
    """

    def __init__(
        self, model: ModelConfig, memory: DecodeMemory, tables: RowTables, selector: Selector, *, writes_host: bool
    ) -> None:
        """`selector`: one of SELECTORS, over the same memory.

        `writes_host`: whether this rank writes new rows to the shared host pool; true on exactly one rank.
        """
        self._model = model
        self._memory = memory
        self._tables = tables
        self._writes_host = writes_host
        self._selector = selector
        self._hot = [_as_rows(*caches) for caches in zip(memory.hot_ckv, memory.hot_k_rope, strict=True)]
        self._host = [_as_rows(*caches) for caches in zip(memory.host_ckv, memory.host_k_rope, strict=True)]
        self._selection: Selection | None = None
        self._owner = -1  # layer that made the selection
        self._step: _Step | None = None
        self._copied = torch.zeros(1, dtype=torch.int64)
        self.counters = HotCounters()

    def begin(
        self,
        rows: Tensor,
        generations: Tensor,
        starts: Tensor,
        counts: Tensor | None = None,
        stable_prefix: Tensor | None = None,
        picks_of: Tensor | None = None,
    ) -> Tensor:
        """Before each pass over one or more layers: some consecutive new tokens of each request.

        Args:
            rows: [B] int64, distinct hot rows.
            generations: [B] int64, positive, of the reservations that hold them.
            starts: [B] int64, position of each request's first new token.
            counts: [B] int64, its new tokens; None: one each.
            stable_prefix: [B] int64, the positions before it are confirmed, and those from it on, up to `starts`, were
                computed since by passes with the same stable prefix; None: `starts`.
            picks_of: [B] int64, rows of the pass before, over one layer, whose top-k the requests' single tokens use in
                place of an indexer's: with the positions since the stable prefix, which the lowest picks make room for.

        Returns:
            [T] int64, the positions of all new tokens, request after request.

        Raises:
            ValueError: more tokens behind the stable prefix than the tail of a hot row holds.
        """
        g = self._memory.geometry
        counts = torch.ones_like(starts) if counts is None else counts
        stable_prefix = starts if stable_prefix is None else stable_prefix
        ends = counts.cumsum(0)
        batch = torch.arange(len(rows)).repeat_interleave(counts)
        positions = torch.arange(len(batch)) + (starts - ends + counts)[batch]
        behind = positions - stable_prefix[batch]
        if int(behind.max()) >= g.block_size:
            raise ValueError(f"{int(behind.max()) + 1} tokens of a request in its tail of {g.block_size} tokens")
        block, within = positions // g.block_size, positions % g.block_size
        main = self._tables.main[rows, : int(block.max()) + 1]
        query_ends, picks = ends.int(), None
        if picks_of is not None:
            picks = self._picks_again(picks_of, positions, behind)
        layout = self._selector.begin(
            Pass(
                rows=rows,
                generations=generations,
                starts=starts,
                stable_prefix=stable_prefix,
                visible=(starts + counts).int(),
                query_ends=query_ends,
                most_tokens=int(counts.max()),
                request=batch,
                positions=positions,
                selects=picks is None,
            )
        )
        hot_lens = torch.full((len(rows),), g.hot.stride, dtype=torch.int32)
        self._selection = None
        self._step = _Step(
            host_slots=main[batch, block].long() * g.block_size + within,
            index_slots=self._tables.indexer[rows[batch], block].long() * g.block_size + within,
            tail_slots=layout.tail_slots,
            picks=picks,
            attention=StepCopyAttention(
                actual_seq_lengths_query=query_ends,
                actual_seq_lengths_kv=hot_lens,
                num_cache_tokens=hot_lens,  # nothing behind the slots given: attention is over the top-k alone
                topk_miss_counts=torch.zeros(len(batch), dtype=torch.int32),  # misses are told by list only
                hbm_block_table=layout.hot_table,
                dram_block_table=main,
                scale_value=self._model.softmax_scale,
                copied_bytes=self._copied,
            ),
        )
        return positions

    def attend(
        self, layer: int, q_nope: Tensor, q_rope: Tensor, ckv: Tensor, k_rope: Tensor, indexer: IndexerQuery | None
    ) -> Tensor:
        """See `engine.model.attention.AttentionBackend.attend`. RuntimeError without `begin`."""
        step = self._step
        if step is None:
            raise RuntimeError("DecodeBackend.attend: no step was begun; call begin() before the forward pass")
        self._write_main(step, layer, ckv, k_rope)
        if indexer is not None:
            self._selection, self._owner = self._select(step, layer, indexer), layer
        elif step.picks is not None:
            self._selection, self._owner = self._selector.again(layer, step.picks), layer
        selection, owner = self._selection, self._model.index_owners[layer]
        if selection is None or self._owner != owner:
            raise RuntimeError(
                f"DecodeBackend.attend: layer {layer} uses the top-k of {owner}, not selected in this pass"
            )
        memory = self._memory
        out = torch.empty_like(q_nope)
        step.attention(
            query_rope=q_rope,
            query=q_nope,
            topk_dst_slots=selection.slots,
            topk_src_ids=selection.topk_ids.unsqueeze(1),
            miss_src_ids=selection.miss_ids,
            miss_dst_slots=selection.miss_slots,
            miss_counts=selection.miss_counts,
            hbm_k_rope=memory.hot_k_rope[layer],
            hbm_kv_cache=memory.hot_ckv[layer],
            dram_k_rope=memory.host_k_rope[layer],
            dram_kv_cache=memory.host_ckv[layer],
            attention_out=out,
        )
        self._count(selection)
        return out

    def _write_main(self, step: _Step, layer: int, ckv: Tensor, k_rope: Tensor) -> None:
        hot, host = self._hot[layer], self._host[layer]
        hot.ckv.index_copy_(0, step.tail_slots, ckv)
        hot.k_rope.index_copy_(0, step.tail_slots, k_rope)
        if self._writes_host:
            host.ckv.index_copy_(0, step.host_slots, ckv)
            host.k_rope.index_copy_(0, step.host_slots, k_rope)

    def _select(self, step: _Step, layer: int, indexer: IndexerQuery) -> Selection:
        cache = self._memory.indexers[layer]
        cache.write(step.index_slots, indexer.k)
        return self._selector.select(layer, cache, indexer)

    def _picks_again(self, picks_of: Tensor, positions: Tensor, behind: Tensor) -> Tensor:
        if self._selection is None:
            raise RuntimeError("DecodeBackend.begin: picks_of is given, but no pass before it has selected anything")
        picks = self._selection.topk_ids[picks_of]
        picks.scatter_(1, (picks.shape[1] - 1 - behind).unsqueeze(1), positions.int().unsqueeze(1))
        return picks

    def _count(self, selection: Selection) -> None:
        self.counters.misses += sum(selection.miss_counts.tolist())
        self.counters.hits += sum(selection.hit_counts.tolist())
        self.counters.bytes_host_to_device += int(self._copied)


def _as_rows(ckv: Tensor, k_rope: Tensor) -> _Rows:
    return _Rows(ckv.view(-1, ckv.shape[-1]), k_rope.view(-1, k_rope.shape[-1]))
