"""Plain torch implementations: one row at a time, no sharing of work; the yardstick of the C++ ones.

Arguments are those of the public functions (``engine.ops.indexer`` and so on), already checked for dtype and shape.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


def query_spans(name: str, ends: Tensor, rows: int) -> list[range]:
    """Rows of each request from cumulative ends; ValueError if they fall or do not end at ``rows``."""
    bounds = [0, *ends.tolist()]
    for i, (last, end) in enumerate(pairwise(bounds)):
        if end < last:
            raise ValueError(f"{name}[{i}] is {end} after {last}; legal: cumulative row counts that never fall")
    if bounds[-1] != rows:
        raise ValueError(f"{name} ends at {bounds[-1]}; legal: the number of query rows, {rows}")
    return [range(last, end) for last, end in pairwise(bounds)]


def cache_rows(name: str, table_row: Tensor, positions: Tensor, blocks: int, block_size: int) -> Tensor:
    """Row index into a cache flattened to [blocks * block_size, ...] of each position of one request.

    Raises:
        ValueError: A position lies beyond the table, or its block is not in [0, blocks).
    """
    columns = positions.long() // block_size
    if bool((positions < 0).any()) or bool((columns >= table_row.shape[0]).any()):
        raise ValueError(f"{name}: a position of {positions.tolist()} lies beyond its {table_row.shape[0]} blocks")
    ids = table_row.long()[columns]
    if bool(((ids < 0) | (ids >= blocks)).any()):
        raise ValueError(f"{name} names a block outside 0 to {blocks - 1}")
    return ids * block_size + positions.long() % block_size


class PagedKeys(NamedTuple):
    """Indexer keys of all requests, with their scales if they are int8."""

    cache: Tensor  # [blocks, block size, 1, Di]
    scale: Tensor | None  # [blocks, block size, 1]
    table: Tensor  # [B, max blocks]

    def rows(self, name: str, request: int, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keys [S, Di] and scales [S] of the request's positions; ValueError (naming the table) if one has no block."""
        at = cache_rows(name, self.table[request], positions, *self.cache.shape[:2])
        return self.cache.flatten(0, 2)[at], None if self.scale is None else self.scale.flatten()[at]


def index_scores(
    query_row: Tensor,
    weights_row: Tensor,
    keys: Tensor,
    query_scale_row: Tensor | None = None,
    key_scales: Tensor | None = None,
) -> Tensor:
    """[S] float32 scores of one row: query_row [Hi, Di], weights_row [Hi], keys [S, Di]; of int8 also the scales [Hi]
    and [S] float16."""
    products = torch.relu(query_row.float() @ keys.float().T)
    if query_scale_row is None or key_scales is None:
        return weights_row.float() @ products
    weights = (weights_row.float() * query_scale_row.float()).half()
    return weights.float() @ (products / 1024).half().float() * key_scales.float()


def best_positions(scores: Tensor, topk: int) -> Tensor:
    """Positions by falling score, ties to the lowest, NaN last; at most ``topk``."""
    ranked = torch.where(scores.isnan(), -torch.inf, scores)
    return torch.sort(ranked, descending=True, stable=True).indices[:topk].int()


def lightning_indexer(
    query: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_ends: Tensor,
    key_lens: Tensor,
    topk: int,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
) -> Tensor:
    """See ``engine.ops.indexer``: ``quant_lightning_indexer`` with scales, else ``lightning_indexer``."""
    keys = PagedKeys(key_cache, key_scale, block_table)
    out = torch.full((query.shape[0], topk), -1, dtype=torch.int32)
    for i, span in enumerate(query_spans("query_ends", query_ends, query.shape[0])):
        if not span:
            continue
        length = max(int(key_lens[i]), 0)
        seen, scales = keys.rows("block_table", i, torch.arange(length))
        for row in span:
            visible = max(length - (span.stop - 1 - row), 0)
            row_scale = None if query_scale is None else query_scale[row]
            row_keys = seen[:visible], row_scale, None if scales is None else scales[:visible]
            best = best_positions(index_scores(query[row], weights[row], *row_keys), topk)
            out[row, : best.shape[0]] = best
    return out


def hadamard_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See ``engine.ops.quantise.hadamard_quantise``."""
    y, dims, width = x.float(), x.shape[-1], 1
    while width < dims:
        low, high = y.view(*x.shape[:-1], -1, 2, width).unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        width *= 2
    y = y * dims**-0.5
    scale = (y.abs().amax(-1) / 127).clamp(max=torch.finfo(torch.float16).max).half()
    levels = (y / scale.float().unsqueeze(-1)).round().clamp(-127, 127)
    return torch.where(scale.unsqueeze(-1) > 0, levels, 0.0).to(torch.int8), scale


def attend(q_nope: Tensor, q_rope: Tensor, ckv: Tensor, k_rope: Tensor, scale: float) -> Tensor:
    """One row: q_nope [N, L], q_rope [N, R], ckv [S, L], k_rope [S, R] -> [N, L] float32; zeros if S is 0."""
    scores = (q_nope.float() @ ckv.float().T + q_rope.float() @ k_rope.float().T) * scale
    return torch.softmax(scores, dim=-1) @ ckv.float()


def sparse_flash_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    ckv_cache: Tensor,
    k_rope_cache: Tensor,
    block_table: Tensor,
    query_ends: Tensor,
    topk_ids: Tensor,
    scale: float,
) -> Tensor:
    """See ``engine.ops.attention.sparse_flash_attention``."""
    blocks, block_size = ckv_cache.shape[:2]
    ckv, k_rope = ckv_cache.flatten(0, 2), k_rope_cache.flatten(0, 2)
    out = torch.empty_like(q_nope)
    for i, span in enumerate(query_spans("query_ends", query_ends, q_nope.shape[0])):
        for row in span:
            chosen = torch.tensor(sorted({p for p in topk_ids[row].tolist() if p >= 0}), dtype=torch.int64)
            at = cache_rows(f"block_table of row {row}", block_table[i], chosen, blocks, block_size)
            out[row] = attend(q_nope[row], q_rope[row], ckv[at], k_rope[at], scale).to(out.dtype)
    return out


def lru_residency(
    topk_ids: Tensor,
    stable_prefix: Tensor,
    generation: Tensor,
    row_index: Tensor,
    query_ends: Tensor | None,
    last_generation: Tensor,
    slot_to_token: Tensor,
    last_used: Tensor,
    clock: Tensor,
    slots: Tensor,
    miss_ids: Tensor,
    miss_slots: Tensor,
    miss_counts: Tensor,
    hit_counts: Tensor,
) -> None:
    """See ``engine.ops.residency.lru_residency``."""
    state_rows, capacity = slot_to_token.shape
    named = [state for state in row_index.tolist() if state >= 0]
    if len(set(named)) != len(named) or any(state >= state_rows for state in named):
        raise ValueError(f"row_index is {row_index.tolist()}; legal: negative or distinct rows 0 to {state_rows - 1}")
    for tensor in (slots, miss_ids, miss_slots):
        tensor.fill_(-1)
    miss_counts.fill_(0)
    hit_counts.fill_(0)
    ends = torch.arange(1, len(topk_ids) + 1) if query_ends is None else query_ends
    for request, span in enumerate(query_spans("query_ends", ends, len(topk_ids))):
        state = int(row_index[request])
        if state < 0:
            continue
        if last_generation[state] != generation[request]:
            last_generation[state] = generation[request]
            slot_to_token[state], last_used[state], clock[state] = -1, 0, 0
        tokens, used = slot_to_token[state].tolist(), last_used[state].tolist()
        if clock[state] > torch.iinfo(torch.int32).max - 2:
            least = min(used)
            used, clock[state] = [time - least for time in used], clock[state] - least
        now = int(clock[state]) + 2
        stable = max(int(stable_prefix[request]), 0)
        wanted = topk_ids[span.start : span.stop].flatten().tolist()
        cached = dict.fromkeys(p for p in wanted if 0 <= p < stable)  # distinct, in order of rows
        for slot, token in enumerate(tokens):
            if token >= stable:
                tokens[slot], used[slot] = -1, 0
            elif token in cached:
                used[slot] = now
        where = {token: slot for slot, token in enumerate(tokens) if token in cached}
        misses = [p for p in cached if p not in where]
        oldest = sorted((slot for slot in range(capacity) if used[slot] < now), key=lambda slot: (used[slot], slot))
        if len(oldest) < len(misses):
            raise ValueError(f"last_used[{state}] holds times later than the row's clock")
        taken = sorted(oldest[: len(misses)])
        for position, slot in zip(misses, taken, strict=True):
            where[position] = slot
            tokens[slot], used[slot] = position, now - 1
        slot_to_token[state], last_used[state] = torch.tensor(tokens), torch.tensor(used)
        clock[state] = now
        at = [-1 if p < 0 else where[p] if p < stable else capacity + p - stable for p in wanted]
        slots[span.start : span.stop] = torch.tensor(at, dtype=torch.int32).view(len(span), topk_ids.shape[1])
        miss_ids[request, : len(misses)] = torch.tensor(misses, dtype=torch.int32)
        miss_slots[request, : len(misses)] = torch.tensor(taken, dtype=torch.int32)
        miss_counts[request] = len(misses)
        hit_counts[request] = sum(0 <= p < stable for p in wanted) - len(misses)


def copy_misses(
    query_ends: Tensor,
    topk_dst_slots: Tensor,
    topk_src_ids: Tensor,
    topk_miss_counts: Tensor,
    miss_src_ids: Tensor,
    miss_dst_slots: Tensor,
    miss_counts: Tensor,
    hbm_block_table: Tensor,
    dram_block_table: Tensor,
    hbm_k_rope: Tensor,
    hbm_kv_cache: Tensor,
    dram_k_rope: Tensor,
    dram_kv_cache: Tensor,
) -> int:
    """The copying half of ``engine.ops.copy_sfa``; returns the bytes copied."""
    block_size, copied = hbm_kv_cache.shape[1], 0
    check_counts("miss_counts", miss_counts, miss_src_ids.shape[1])
    check_counts("topk_miss_counts", topk_miss_counts, topk_src_ids.shape[2])
    for i, span in enumerate(query_spans("actual_seq_lengths_query", query_ends, topk_src_ids.shape[0])):
        count = int(miss_counts[i])
        pairs = list(zip(miss_src_ids[i, :count].tolist(), miss_dst_slots[i, :count].tolist(), strict=True))
        if count == 0:
            for row in span:
                leading = int(topk_miss_counts[row])
                row_pairs = topk_src_ids[row, 0, :leading], topk_dst_slots[row, 0, :leading]
                pairs += zip(*(side.tolist() for side in row_pairs), strict=True)
        source_of = {slot: source for source, slot in pairs if source >= 0 and slot >= 0}  # the last one counts
        sources, slots = torch.tensor(list(source_of.values())), torch.tensor(list(source_of))
        source = cache_rows("dram_block_table", dram_block_table[i], sources, dram_kv_cache.shape[0], block_size)
        target = cache_rows("hbm_block_table", hbm_block_table[i], slots, hbm_kv_cache.shape[0], block_size)
        for host, hot in ((dram_kv_cache, hbm_kv_cache), (dram_k_rope, hbm_k_rope)):
            rows = host.flatten(0, 1)[source]
            hot.view(-1, hot.shape[-1])[target] = rows
            copied += rows.numel() * rows.element_size()
    return copied


def hot_attention(
    query_rope: Tensor,
    query: Tensor,
    query_ends: Tensor,
    kv_lens: Tensor,
    num_cache_tokens: Tensor,
    topk_dst_slots: Tensor,
    hbm_block_table: Tensor,
    hbm_k_rope: Tensor,
    hbm_kv_cache: Tensor,
    out: Tensor,
    *,
    scale: float,
) -> None:
    """The attending half of ``engine.ops.copy_sfa``."""
    blocks, block_size = hbm_kv_cache.shape[:2]
    for i, span in enumerate(query_spans("actual_seq_lengths_query", query_ends, query.shape[0])):
        kept, length = int(num_cache_tokens[i]), int(kv_lens[i])
        if kept < 0 or length < 0:
            raise ValueError(f"num_cache_tokens[{i}] is {kept}, actual_seq_lengths_kv[{i}] {length}; legal: 0 or more")
        for row in span:
            visible = length - (span.stop - 1 - row)
            chosen = topk_dst_slots[row, 0][topk_dst_slots[row, 0] >= 0].tolist() if kept > 0 else []
            attended = {*chosen, *range(kept, visible)} if length > 0 and visible > 0 else set()
            slots = torch.tensor(sorted(attended), dtype=torch.int64)
            at = cache_rows(f"hbm_block_table of request {i}", hbm_block_table[i], slots, blocks, block_size)
            ckv, k_rope = hbm_kv_cache.flatten(0, 2)[at], hbm_k_rope.flatten(0, 2)[at]
            out[row] = attend(query[row], query_rope[row], ckv, k_rope, scale).to(out.dtype)


def check_counts(name: str, counts: Tensor, most: int) -> None:
    """ValueError unless every count lies in [0, most]."""
    for i, count in enumerate(counts.tolist()):
        if not 0 <= count <= most:
            raise ValueError(f"{name}[{i}] is {count}; legal: 0 to {most}")
