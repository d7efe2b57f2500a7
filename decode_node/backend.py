"""Decode attention over the hot buffer: attends exactly the indexer's top-k, however small the buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from decode_node.memory import DecodeMemory, RowTables
from engine.model.attention import IndexerQuery
from engine.model.config import ModelConfig
from engine.ops.copy_sfa import StepCopyAttention
from engine.ops.residency import Residency, ResidencyState, StepResidency


class _Step(NamedTuple):
    """What all layers of a step share. B requests, T tokens."""

    query_ends: Tensor  # [B] int32, cumulative number of tokens
    visible: Tensor  # [B] int32: positions the request's last token sees, itself included
    indexer_table: Tensor  # [B, width] int32
    host_slots: Tensor  # [T] int64: where the new main-KV rows go in the host pool
    index_slots: Tensor  # [T] int64: where the new indexer keys go
    tail_slots: Tensor  # [T] int64: where the new main-KV rows go in the hot buffer
    picks: Tensor | None  # [T, topk] int32: what tokens attend to whose layer selects nothing itself
    residency: StepResidency
    attention: StepCopyAttention


class _Selection(NamedTuple):
    """What an owning layer selected; layers that share it use it as it is, with their own caches.

    There is one at a time: the next owner's takes its memory.
    """

    owner: int
    topk_ids: Tensor  # [T, topk] int32
    residency: Residency


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
    3. residency says which picked rows are in the hot row and which slots the missing ones get;
    4. Copy-SFA fetches these from the host pool and attends over exactly the picked slots.

    A layer without an indexer skips 2 and 3: hot rows have one layout in all layers, so the owner's picks, slots and
    misses are right for its caches too, if it makes the same copies in every step (it does).

    Invariant "sealed prefix" (test_sealed_prefix): a hot slot counts as a hit only for the same request generation,
    and only for confirmed positions that earlier steps wrote; the step's own tokens are always read from the tail. So a
    drafted token that proves wrong leaves nothing behind: its rows are written anew, in the host pool too, before its
    position is sealed (test_rollback_never_leaves_a_wrong_row_resident).
    """

    def __init__(self, model: ModelConfig, memory: DecodeMemory, tables: RowTables, *, writes_host: bool) -> None:
        """`writes_host`: whether this rank writes new rows to the shared host pool; true on exactly one rank."""
        self._model = model
        self._memory = memory
        self._tables = tables
        self._writes_host = writes_host
        hot = memory.geometry.hot
        self._states = {layer: ResidencyState.empty(hot.rows, hot.tokens) for layer in model.indexer_layers}
        self._hot = [_as_rows(*caches) for caches in zip(memory.hot_ckv, memory.hot_k_rope, strict=True)]
        self._host = [_as_rows(*caches) for caches in zip(memory.host_ckv, memory.host_k_rope, strict=True)]
        self._selection: _Selection | None = None
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
        width = int(block.max()) + 1
        main, indexer = self._tables.main[rows, :width], self._tables.indexer[rows, :width]
        query_ends = ends.int()
        residency = Residency.empty(len(batch), self._model.index_topk, len(rows), int(counts.max()))
        hot_lens = torch.full((len(rows),), g.hot.stride, dtype=torch.int32)
        picks = None if picks_of is None else self._picks_again(picks_of, positions, behind)
        self._selection = None
        self._step = _Step(
            query_ends=query_ends,
            visible=(starts + counts).int(),
            indexer_table=indexer,
            host_slots=main[batch, block].long() * g.block_size + within,
            index_slots=indexer[batch, block].long() * g.block_size + within,
            tail_slots=rows[batch] * g.hot.stride + g.hot.tokens + behind,
            picks=picks,
            residency=StepResidency(stable_prefix.int(), generations, rows.int(), query_ends, residency),
            attention=StepCopyAttention(
                actual_seq_lengths_query=query_ends,
                actual_seq_lengths_kv=hot_lens,
                num_cache_tokens=hot_lens,  # nothing behind the slots given: attention is over the top-k alone
                topk_dst_slots=residency.slots.unsqueeze(1),
                topk_miss_counts=torch.zeros(len(batch), dtype=torch.int32),  # misses are told by list only
                miss_src_ids=residency.miss_ids,
                miss_dst_slots=residency.miss_slots,
                miss_counts=residency.miss_counts,
                hbm_block_table=self._tables.hot[rows],
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
            self._selection = self._select(step, layer, indexer)
        elif step.picks is not None:
            self._selection = _Selection(layer, step.picks, step.residency(step.picks, self._states[layer]))
        selection, owner = self._selection, self._model.index_owners[layer]
        if selection is None or selection.owner != owner:
            raise RuntimeError(
                f"DecodeBackend.attend: layer {layer} uses the top-k of {owner}, not selected in this pass"
            )
        memory = self._memory
        out = torch.empty_like(q_nope)
        step.attention(
            query_rope=q_rope,
            query=q_nope,
            topk_src_ids=selection.topk_ids.unsqueeze(1),
            hbm_k_rope=memory.hot_k_rope[layer],
            hbm_kv_cache=memory.hot_ckv[layer],
            dram_k_rope=memory.host_k_rope[layer],
            dram_kv_cache=memory.host_ckv[layer],
            attention_out=out,
        )
        self._count(selection.residency)
        return out

    def _write_main(self, step: _Step, layer: int, ckv: Tensor, k_rope: Tensor) -> None:
        hot, host = self._hot[layer], self._host[layer]
        hot.ckv.index_copy_(0, step.tail_slots, ckv)
        hot.k_rope.index_copy_(0, step.tail_slots, k_rope)
        if self._writes_host:
            host.ckv.index_copy_(0, step.host_slots, ckv)
            host.k_rope.index_copy_(0, step.host_slots, k_rope)

    def _select(self, step: _Step, layer: int, indexer: IndexerQuery) -> _Selection:
        cache = self._memory.indexers[layer]
        cache.write(step.index_slots, indexer.k)
        topk_ids = cache.select(indexer, step.indexer_table, step.query_ends, step.visible, self._model.index_topk)
        return _Selection(layer, topk_ids, step.residency(topk_ids, self._states[layer]))

    def _picks_again(self, picks_of: Tensor, positions: Tensor, behind: Tensor) -> Tensor:
        if self._selection is None:
            raise RuntimeError("DecodeBackend.begin: picks_of is given, but no pass before it has selected anything")
        picks = self._selection.topk_ids[picks_of]
        picks.scatter_(1, (picks.shape[1] - 1 - behind).unsqueeze(1), positions.int().unsqueeze(1))
        return picks

    def _count(self, residency: Residency) -> None:
        self.counters.misses += sum(residency.miss_counts.tolist())
        self.counters.hits += sum(residency.hit_counts.tolist())
        self.counters.bytes_host_to_device += int(self._copied)


def _as_rows(ckv: Tensor, k_rope: Tensor) -> _Rows:
    return _Rows(ckv.view(-1, ckv.shape[-1]), k_rope.view(-1, k_rope.shape[-1]))
