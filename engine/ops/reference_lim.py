"""Plain torch implementation of the fused indexer, one request at a time, with Python sets and dicts for the map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.ops.reference import PagedKeys, best_positions, index_scores, query_spans

if TYPE_CHECKING:
    from engine.ops.lim_call import LimCall

_NO_SLOT = torch.iinfo(torch.int32).min


@dataclass(frozen=True)
class _Request:
    """One request of the batch: its rows and the map it starts from."""

    rows: range
    state: int
    keys: int
    stable: int
    capacity: int
    slots: list[int]  # its row of the pool

    def is_legal(self, topk: int, block: int, miss_capacity: int) -> bool:
        q, width = len(self.rows), len(self.slots)
        if not q <= self.keys <= width:
            return False
        if self.state == -3:
            return True
        hot_is_enough = self.capacity == self.stable if self.stable <= q * topk else self.capacity >= q * topk
        sizes = (
            topk <= self.stable <= (self.keys - q) // block * block
            and self.capacity <= min(self.stable, miss_capacity)
            and self.stable % block == self.capacity % block == 0
            and hot_is_enough
        )
        if self.state == -1:
            return sizes and (self.is_identity() or self.is_bijection())
        return sizes and self.state == -2

    def is_identity(self) -> bool:
        return self.slots == list(range(len(self.slots)))

    def is_bijection(self) -> bool:
        residents = {position: slot for position, slot in enumerate(self.slots) if slot >= 0}
        return sorted(residents.values()) == list(range(self.capacity)) and all(p < self.stable for p in residents)


def fused_lightning_indexer_manage(call: LimCall, query_scale: Tensor | None, key_scale: Tensor | None) -> None:
    """See ``engine.ops.lim.fused_lightning_indexer_manage``; scales for int8 queries only."""
    spans = query_spans("actual_seq_lengths_query", call.actual_seq_lengths_query, call.query.shape[0])
    if any(not span for span in spans):
        ends = call.actual_seq_lengths_query.tolist()
        raise ValueError(f"actual_seq_lengths_query is {ends}; legal: strictly increasing row counts")
    pool, entries = call.cache_slots_pool, call.req_pool_entries.tolist()
    if len(set(entries)) != len(entries) or any(not 0 <= entry < pool.shape[0] for entry in entries):
        raise ValueError(f"req_pool_entries is {entries}; legal: distinct rows 0 to {pool.shape[0] - 1}")
    topk, block = call.topk_src_ids.shape[2], call.index_key_cache.shape[1]
    paged = PagedKeys(call.index_key_cache, key_scale, call.index_block_table)
    out_scores = torch.empty(call.topk_src_ids.shape) if call.topk_scores is None else call.topk_scores
    for i, rows in enumerate(spans):
        request = _Request(
            rows,
            int(call.request_state[i]),
            int(call.actual_seq_lengths_key[i]),
            int(call.offload_seq_lengths_key[i]),
            int(call.num_cache_tokens[i]),
            pool[entries[i]].tolist(),
        )
        call.topk_src_ids[rows.start : rows.stop] = -1
        call.topk_dst_slots[rows.start : rows.stop] = -1
        out_scores[rows.start : rows.stop] = -torch.inf
        call.topk_miss_counts[rows.start : rows.stop] = 0
        call.miss_counts[i] = 0
        if not request.is_legal(topk, block, call.miss_src_ids.shape[1]):
            continue
        searched = request.keys if request.state == -3 else request.stable
        keys, scales = paged.rows("index_block_table", i, torch.arange(searched))
        scores = [
            index_scores(
                call.query[row],
                call.index_weights[row],
                keys,
                None if query_scale is None else query_scale[row],
                scales,
            )
            for row in rows
        ]
        if request.state == -3:
            for row, row_scores in zip(rows, scores, strict=True):
                best = best_positions(row_scores[: request.keys - (rows.stop - 1 - row)], topk)
                call.topk_src_ids[row, 0, : len(best)] = call.topk_dst_slots[row, 0, : len(best)] = best
                out_scores[row, 0, : len(best)] = row_scores[best.long()]
            pool[entries[i]] = torch.arange(pool.shape[1])
            continue
        chosen = [sorted(best_positions(row_scores, topk).tolist()) for row_scores in scores]
        slot_of, misses = _first_fill(request, chosen) if request.state == -2 else _swap(request, chosen, scores)
        for row, ids, row_scores in zip(rows, chosen, scores, strict=True):
            ordered = [p for p in ids if p in misses] + [p for p in ids if p not in misses]
            call.topk_src_ids[row, 0] = torch.tensor(ordered)
            call.topk_dst_slots[row, 0] = torch.tensor([slot_of[p] for p in ordered])
            out_scores[row, 0] = row_scores[ordered]
            call.topk_miss_counts[row] = topk if request.state == -2 else sum(p in misses for p in ids)
        call.miss_counts[i] = len(misses)
        call.miss_src_ids[i, : len(misses)] = torch.tensor(list(misses), dtype=torch.int32)
        call.miss_dst_slots[i, : len(misses)] = torch.tensor([slot_of[p] for p in misses], dtype=torch.int32)
        pool[entries[i]] = _NO_SLOT
        for position, slot in slot_of.items():
            pool[entries[i], position] = slot


def _first_fill(request: _Request, chosen: list[list[int]]) -> tuple[dict[int, int], dict[int, None]]:
    """The new map and the positions to fetch, in order."""
    union = sorted({p for ids in chosen for p in ids})
    rest = [p for p in range(request.stable) if p not in set(union)]
    filled = (union + rest)[: request.capacity]
    return {position: slot for slot, position in enumerate(filled)}, dict.fromkeys(filled)


def _swap(request: _Request, chosen: list[list[int]], scores: list[Tensor]) -> tuple[dict[int, int], dict[int, None]]:
    """The map after misses took the slots of the lowest-scored residents nobody selected, and the misses."""
    slots = request.slots[: request.capacity] if request.is_identity() else request.slots
    slot_of = {position: slot for position, slot in enumerate(slots) if slot >= 0}
    union = {p for ids in chosen for p in ids}
    misses = sorted(union - slot_of.keys())
    total = torch.stack(scores).sum(0)
    candidates = sorted(slot_of.keys() - union, key=lambda p: (float(total[p]), -p))
    for miss, victim in zip(misses, candidates[: len(misses)], strict=True):
        slot_of[miss] = slot_of.pop(victim)
    return slot_of, dict.fromkeys(misses)
