"""The exact top-k of LIM's picks and the tail, from torch's own operators: Ascend has none for it."""

from __future__ import annotations

import torch
from torch import Tensor

TAIL_BLOCKS = 2
"""Tails are at most this long; a decode loop whose prefix is in whole blocks has no longer ones."""


def select_with_tail(
    index_weights: Tensor,
    query: Tensor,
    index_key_cache: Tensor,
    index_block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    offload_seq_lengths_key: Tensor,
    num_cache_tokens: Tensor,
    request_state: Tensor,
    topk_src_ids: Tensor,
    topk_dst_slots: Tensor,
    topk_scores: Tensor | None = None,
    query_dequant_scale: Tensor | None = None,
    index_key_dequant_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``engine.ops.select_with_tail`` on any device, without a value read on the host.

    ``topk_scores`` is not used. Of a tail longer than ``TAIL_BLOCKS`` blocks only the beginning is considered.
    """
    device, topk, block = query.device, topk_src_ids.shape[2], index_key_cache.shape[1]
    row = torch.arange(query.shape[0], dtype=torch.int32, device=device)
    request = torch.searchsorted(actual_seq_lengths_query, row, right=True)
    visible = actual_seq_lengths_key[request] - (actual_seq_lengths_query[request] - 1 - row)
    picks, slots = topk_src_ids.squeeze(1), topk_dst_slots.squeeze(1)

    behind = torch.arange(TAIL_BLOCKS * block, dtype=torch.int32, device=device)
    tail = offload_seq_lengths_key[request].unsqueeze(1) + behind
    positions = torch.cat([picks, torch.where(tail < visible.unsqueeze(1), tail, -1)], 1)
    places = torch.cat([slots, num_cache_tokens[request].unsqueeze(1) + behind], 1)
    order = torch.where(positions < 0, torch.iinfo(torch.int32).max, positions).argsort(1)  # ties: lowest position
    positions, places = positions.gather(1, order), places.gather(1, order)

    at = positions.clamp(min=0).long()
    rows = index_block_table[request].gather(1, at // block) * block + at % block
    keys = index_key_cache.flatten(0, 2)[rows].float()
    products = torch.relu(torch.einsum("thd,tcd->thc", query.float(), keys))
    weights = index_weights.float()
    if query_dequant_scale is not None and index_key_dequant_scale is not None:
        weights = (weights * query_dequant_scale.float()).half().float()
        products = (products / 1024).half().float()
    scores = torch.einsum("th,thc->tc", weights, products)
    if index_key_dequant_scale is not None:
        scores = scores * index_key_dequant_scale.flatten()[rows].float()
    best = torch.where(positions < 0, -torch.inf, scores).sort(dim=1, descending=True, stable=True).indices[:, :topk]
    ids, at_slots = positions.gather(1, best), places.gather(1, best)

    done = ((request_state[request] == -3) | (picks < 0).all(1)).unsqueeze(1)
    ids, at_slots = torch.where(done, picks, ids), torch.where(done, slots, torch.where(ids < 0, -1, at_slots))
    return ids.unsqueeze(1), at_slots.unsqueeze(1)
