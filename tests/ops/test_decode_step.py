"""The operators together: a whole decode from a hot buffer much smaller than the context."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops import (
    ResidencyState,
    fused_lightning_indexer_manage,
    fused_scatter_copy_sparse_flash_attention,
    lightning_indexer,
    lru_residency,
)
from tests.ops.copy_case import copy_case, run
from tests.ops.lim_case import lim_case
from tests.ops.paged_case import TOLERANCE, dense_attention, gather, generator, i32

BLOCK, TOPK, CAPACITY, HEADS, LATENT, ROPE, INDEX_HEADS, INDEX_DIMS = 8, 16, 24, 4, 32, 8, 16, 16
TAIL_BLOCKS = 1
HOT_BLOCKS = CAPACITY // BLOCK + TAIL_BLOCKS


class Request:
    """One request of the emulated decode: its own rows, and the plain tensors the answer is computed from."""

    def __init__(self, row: int, prompt: int, steps: int, dtype: torch.dtype, seed: int) -> None:
        rng, length = generator(seed), prompt + steps
        self.row, self.length = row, prompt
        self.ckv = torch.randn(length, LATENT, generator=rng).to(dtype)
        self.k_rope = torch.randn(length, ROPE, generator=rng).to(dtype)
        self.index_keys = torch.randn(length, INDEX_DIMS, generator=rng).to(dtype)
        blocks = -(-length // BLOCK)
        self.first_block = row * 64
        self.table = (torch.randperm(blocks, generator=rng) + self.first_block).int()

    def place(self, cache: Tensor, position: int) -> Tensor:
        """The cache row of `position` in a paged cache."""
        return cache[int(self.table[position // BLOCK]), position % BLOCK]

    def selected(self, query: Tensor, weights: Tensor) -> list[int]:
        keys = self.index_keys[: self.length].double()
        scores = (weights.double()[:, None] * (query.double() @ keys.T).clamp(min=0)).sum(0)
        return torch.sort(scores, descending=True, stable=True).indices[:TOPK].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_from_a_small_hot_buffer_equals_dense_float64(each_backend: str, dtype: torch.dtype) -> None:
    steps, rng = 20, generator(11)
    requests = [Request(2, 150, steps, dtype, 1), Request(0, 15, steps, dtype, 2), Request(1, 64, steps, dtype, 3)]
    blocks = 64 * 3
    host_ckv, host_rope = torch.zeros(blocks, BLOCK, LATENT, dtype=dtype), torch.zeros(blocks, BLOCK, ROPE, dtype=dtype)
    index_cache = torch.zeros(blocks, BLOCK, 1, INDEX_DIMS, dtype=dtype)
    nan = float("nan")  # whatever is attended to without having been copied shows
    hot_ckv = torch.full((3 * HOT_BLOCKS, BLOCK, 1, LATENT), nan, dtype=dtype)
    hot_rope = torch.full((3 * HOT_BLOCKS, BLOCK, 1, ROPE), nan, dtype=dtype)
    for request in requests:
        for p in range(request.length):
            request.place(host_ckv, p).copy_(request.ckv[p])
            request.place(host_rope, p).copy_(request.k_rope[p])
            request.place(index_cache, p).copy_(request.index_keys[p])
    state = ResidencyState.empty(3, CAPACITY)
    width = max(len(r.table) for r in requests)
    table = torch.stack([torch.nn.functional.pad(r.table, (0, width - len(r.table)), value=-1) for r in requests])
    hot_table = torch.stack([torch.arange(HOT_BLOCKS) + r.row * HOT_BLOCKS for r in requests]).int()
    hits = lookups = 0

    for step in range(steps):
        batch = requests if step % 3 else requests[:2]  # the third request is not in every step
        n = len(batch)
        query = torch.randn(n, INDEX_HEADS, INDEX_DIMS, generator=rng).to(dtype)
        weights = torch.randn(n, INDEX_HEADS, generator=rng).abs()
        q_nope = torch.randn(n, HEADS, LATENT, generator=rng).to(dtype)
        q_rope = torch.randn(n, HEADS, ROPE, generator=rng).to(dtype)
        stable = []
        for request in batch:  # the new token: to the host, and to the tail of the device's row
            p = request.length
            request.place(host_ckv, p).copy_(request.ckv[p])
            request.place(host_rope, p).copy_(request.k_rope[p])
            request.place(index_cache, p).copy_(request.index_keys[p])
            tail = request.row * HOT_BLOCKS + CAPACITY // BLOCK
            hot_ckv[tail, 0, 0], hot_rope[tail, 0, 0] = request.ckv[p], request.k_rope[p]
            request.length += 1
            stable.append(p)
        ends, lens = torch.arange(1, n + 1).int(), i32([r.length for r in batch])
        ids = lightning_indexer(query, weights, index_cache, table[:n].contiguous(), ends, lens, TOPK)
        generations = torch.tensor([100 + r.row for r in batch])
        found = lru_residency(ids, i32(stable), generations, i32([r.row for r in batch]), state)
        out, copied = torch.empty_like(q_nope), torch.zeros(1, dtype=torch.int64)
        hot_len = torch.full((n,), HOT_BLOCKS * BLOCK, dtype=torch.int32)
        fused_scatter_copy_sparse_flash_attention(
            *(q_rope, q_nope, ends, hot_len, hot_len),
            *(found.slots.unsqueeze(1), ids.unsqueeze(1), torch.zeros(n, dtype=torch.int32)),
            *(found.miss_ids, found.miss_slots, found.miss_counts),
            *(hot_table[:n].contiguous(), table[:n].contiguous(), hot_rope, hot_ckv, host_rope, host_ckv),
            *(0.15, out, copied),
        )
        misses = int(found.miss_counts.sum())
        assert int(copied) == misses * (LATENT + ROPE) * host_ckv.element_size()
        sealed = sum(int(((row >= 0) & (row < s)).sum()) for row, s in zip(ids, stable, strict=True))
        hits, lookups = hits + sealed - misses, lookups + sealed
        for i, request in enumerate(batch):
            chosen = request.selected(query[i], weights[i])
            assert set(ids[i].tolist()) - {-1} == set(chosen)
            wanted = dense_attention(q_nope[i], q_rope[i], request.ckv, request.k_rope, chosen, 0.15)
            torch.testing.assert_close(out[i].double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert 0 < hits < lookups


def test_the_fused_operators_hand_over_to_each_other(each_backend: str) -> None:
    """LIM then Copy-SFA, first decode and steady, several rows: attention over each row's top-k and the tail."""
    topk, stable, capacity, keys, q = 8, 40, 24, 45, 3
    dense = copy_case(
        rows=[q], contexts=[stable], hot_lens=[capacity + keys - stable], cache_tokens=[capacity], topk=topk
    )
    tail = {key: gather(dense[f"hbm_{key}"], dense["hbm_block_table"][0], 29)[24:] for key in ("kv_cache", "k_rope")}
    host = {key: gather(dense[f"dram_{key}"], dense["dram_block_table"][0], stable) for key in ("kv_cache", "k_rope")}
    dense["hbm_kv_cache"].view(-1)[:] = float("nan")
    for slot in range(capacity, capacity + keys - stable):
        block = int(dense["hbm_block_table"][0, slot // 4])
        for key, rows in tail.items():
            dense[f"hbm_{key}"][block, slot % 4, 0] = rows[slot - capacity]
    pool = None
    for step, state in enumerate((-2, -1, -1)):
        selection = lim_case([(q, keys, stable, capacity, state)], topk=topk, seed=step)
        if pool is not None:
            selection["cache_slots_pool"] = pool
        fused_lightning_indexer_manage(*selection.values())
        pool = selection["cache_slots_pool"]
        handed = ("topk_dst_slots", "topk_src_ids", "topk_miss_counts", "miss_src_ids", "miss_dst_slots", "miss_counts")
        dense.update({name: selection[name] for name in handed})
        run(dense)
        for row in range(q):
            chosen = selection["topk_src_ids"][row, 0].tolist()
            visible = keys - (q - 1 - row) - stable
            ckv, k_rope = (torch.cat([host[key][chosen], tail[key][:visible]]) for key in ("kv_cache", "k_rope"))
            everything = list(range(len(ckv)))
            query = dense["query"][row], dense["query_rope"][row]
            wanted = dense_attention(*query, ckv, k_rope, everything, dense["scale_value"])
            torch.testing.assert_close(dense["attention_out"][row].double(), wanted, atol=2e-5, rtol=2e-5)
