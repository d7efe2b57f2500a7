"""Plain torch implementation of the selection with the tail, one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.reference import PagedKeys, best_positions, index_scores, query_spans


def select_with_tail(
    weights: Tensor,
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_ends: Tensor,
    key_lens: Tensor,
    stable_lens: Tensor,
    cache_tokens: Tensor,
    states: Tensor,
    topk_src_ids: Tensor,
    topk_dst_slots: Tensor,
    topk_scores: Tensor | None,
    query_scale: Tensor | None,
    key_scale: Tensor | None,
    ids: Tensor,
    slots: Tensor,
) -> None:
    """See ``engine.ops.tail.select_with_tail``; ``ids`` and ``slots`` are written."""
    spans = query_spans("actual_seq_lengths_query", query_ends, query.shape[0])
    if any(not span for span in spans):
        raise ValueError(f"actual_seq_lengths_query is {query_ends.tolist()}; legal: strictly increasing row counts")
    paged, topk = PagedKeys(key_cache, key_scale, block_table), topk_src_ids.shape[2]
    for i, span in enumerate(spans):
        stable, capacity = int(stable_lens[i]), int(cache_tokens[i])
        for row in span:
            chosen = [p for p in topk_src_ids[row, 0].tolist() if p != -1]
            if states[i] == -3 or not chosen:
                ids[row], slots[row] = topk_src_ids[row], topk_dst_slots[row]
                continue
            if any(not 0 <= p < stable for p in chosen):
                raise ValueError(f"topk_src_ids of row {row} is {chosen}; legal: -1 to {stable - 1}")
            slot_of = dict(zip(chosen, topk_dst_slots[row, 0].tolist(), strict=False))
            tail = range(stable, int(key_lens[i]) - (span.stop - 1 - row))
            slot_of.update((p, capacity + p - stable) for p in tail)
            candidates = torch.tensor(sorted(slot_of))
            keys, scales = paged.rows("index_block_table", i, candidates)
            row_scale = None if query_scale is None else query_scale[row]
            scores = index_scores(query[row], weights[row], keys, row_scale, scales)
            if topk_scores is not None:
                given = dict(zip(chosen, topk_scores[row, 0].tolist(), strict=False))
                scores = torch.tensor(
                    [given.get(p, s) for p, s in zip(candidates.tolist(), scores.tolist(), strict=True)]
                )
            best = candidates[best_positions(scores, topk).long()].tolist()
            padding = [-1] * (topk - len(best))
            ids[row, 0] = torch.tensor(best + padding)
            slots[row, 0] = torch.tensor([slot_of[p] for p in best] + padding)
