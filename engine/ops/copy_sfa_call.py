"""One call of Copy-SFA: its arguments, their checks, and the way to the CPU back ends."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.ops import native, reference
from engine.ops.backends import current_backend
from engine.ops.checks import FLOAT_DTYPES, check_positive, check_tensor

STRUCT_NAMES = {
    "actual_seq_lengths_query": "query_ends",
    "actual_seq_lengths_kv": "kv_lens",
    "num_cache_tokens": "cache_tokens",
    "hbm_k_rope": "hbm_rope",
    "hbm_kv_cache": "hbm_ckv",
    "dram_k_rope": "dram_rope",
    "dram_kv_cache": "dram_ckv",
    "scale_value": "scale",
    "attention_out": "out",
}
"""Fields of the C++ argument struct that are named otherwise than the operator's arguments."""


class CopyAttentionCall(NamedTuple):
    """The operator's arguments in order; see ``engine.ops.fused_scatter_copy_sparse_flash_attention``."""

    query_rope: Tensor
    query: Tensor
    actual_seq_lengths_query: Tensor
    actual_seq_lengths_kv: Tensor
    num_cache_tokens: Tensor
    topk_dst_slots: Tensor
    topk_src_ids: Tensor
    topk_miss_counts: Tensor
    miss_src_ids: Tensor
    miss_dst_slots: Tensor
    miss_counts: Tensor
    hbm_block_table: Tensor
    dram_block_table: Tensor
    hbm_k_rope: Tensor
    hbm_kv_cache: Tensor
    dram_k_rope: Tensor
    dram_kv_cache: Tensor
    scale_value: float
    attention_out: Tensor
    copied_bytes: Tensor | None = None  # the dispatcher leaves a trailing default out

    def run(self) -> None:
        """Check the arguments and run the current CPU back end. Raises ValueError."""
        values = self.checked()
        if current_backend() == "reference":
            self._run_reference()
        else:
            native.call("copy_sparse_flash_attention", values)

    def checked(self) -> native.Values:
        """The fields of the C++ argument struct. Raises ValueError for an illegal dtype, shape, layout or device."""
        check_tensor("query", self.query, (None, None, None), FLOAT_DTYPES)
        rows, heads, latent = self.query.shape
        check_tensor("query_rope", self.query_rope, (rows, heads, None), self.query.dtype)
        rope = self.query_rope.shape[2]
        check_tensor("actual_seq_lengths_query", self.actual_seq_lengths_query, (None,), torch.int32)
        requests = self.actual_seq_lengths_query.shape[0]
        check_tensor("actual_seq_lengths_kv", self.actual_seq_lengths_kv, (requests,), torch.int32)
        check_tensor("num_cache_tokens", self.num_cache_tokens, (requests,), torch.int32)
        check_tensor("topk_dst_slots", self.topk_dst_slots, (rows, 1, None), torch.int32)
        topk = self.topk_dst_slots.shape[2]
        check_tensor("topk_src_ids", self.topk_src_ids, (rows, 1, topk), torch.int32)
        check_tensor("topk_miss_counts", self.topk_miss_counts, (rows,), torch.int32)
        check_tensor("miss_src_ids", self.miss_src_ids, (requests, None), torch.int32)
        miss_capacity = self.miss_src_ids.shape[1]
        check_tensor("miss_dst_slots", self.miss_dst_slots, (requests, miss_capacity), torch.int32)
        check_tensor("miss_counts", self.miss_counts, (requests,), torch.int32)
        check_tensor("hbm_block_table", self.hbm_block_table, (requests, None), torch.int32)
        check_tensor("dram_block_table", self.dram_block_table, (requests, None), torch.int32)
        check_tensor("hbm_kv_cache", self.hbm_kv_cache, (None, None, 1, latent), self.query.dtype)
        hbm_blocks, block_size = self.hbm_kv_cache.shape[:2]
        check_positive("hbm_kv_cache.shape[1] (block size)", block_size)
        check_tensor("hbm_k_rope", self.hbm_k_rope, (hbm_blocks, block_size, 1, rope), self.query.dtype)
        check_tensor("dram_kv_cache", self.dram_kv_cache, (None, block_size, latent), self.query.dtype)
        dram_blocks = self.dram_kv_cache.shape[0]
        check_tensor("dram_k_rope", self.dram_k_rope, (dram_blocks, block_size, rope), self.query.dtype)
        check_tensor("attention_out", self.attention_out, (rows, heads, latent), self.query.dtype)
        if self.copied_bytes is not None:
            check_tensor("copied_bytes", self.copied_bytes, (1,), torch.int64)
        return {
            **{STRUCT_NAMES.get(name, name): value for name, value in self._asdict().items()},
            "rows": rows,
            "heads": heads,
            "latent": latent,
            "rope": rope,
            "requests": requests,
            "topk": topk,
            "miss_capacity": miss_capacity,
            "hbm_blocks": hbm_blocks,
            "dram_blocks": dram_blocks,
            "block_size": block_size,
            "hbm_max_blocks": self.hbm_block_table.shape[1],
            "dram_max_blocks": self.dram_block_table.shape[1],
            "dtype": native.dtype_code(self.query),
        }

    def _run_reference(self) -> None:
        moved = reference.copy_misses(
            *(self.actual_seq_lengths_query, self.topk_dst_slots, self.topk_src_ids, self.topk_miss_counts),
            *(self.miss_src_ids, self.miss_dst_slots, self.miss_counts, self.hbm_block_table, self.dram_block_table),
            *(self.hbm_k_rope, self.hbm_kv_cache, self.dram_k_rope, self.dram_kv_cache),
        )
        if self.copied_bytes is not None:
            self.copied_bytes.fill_(moved)
        reference.hot_attention(
            *(self.query_rope, self.query, self.actual_seq_lengths_query, self.actual_seq_lengths_kv),
            *(self.num_cache_tokens, self.topk_dst_slots, self.hbm_block_table),
            *(self.hbm_k_rope, self.hbm_kv_cache, self.attention_out),
            scale=self.scale_value,
        )
