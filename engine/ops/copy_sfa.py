"""Copy-SFA: fetch a decode step's misses from host memory into the hot buffer, then attend there."""

from __future__ import annotations

from torch import Tensor

from engine.ops import native
from engine.ops.backends import current_backend
from engine.ops.copy_sfa_call import STRUCT_NAMES, CopyAttentionCall
from engine.ops.registry import register


def fused_scatter_copy_sparse_flash_attention(
    query_rope: Tensor,
    query: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    num_cache_tokens: Tensor,
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
    scale_value: float,
    attention_out: Tensor,
    copied_bytes: Tensor | None = None,
) -> None:
    """Copy every request's misses from host to hot slots (bit exact), then attend each row to its hot slots.

    T rows, N heads, L latent dims, R rope dims, B requests, M miss capacity, K top-k; metadata is int32, the rest of
    one dtype (float32, bfloat16, float16). Same argument order as the Ascend operator
    ``npu_fused_scatter_copy_sparse_flash_attention``, but general in all sizes.

    Copies: the first ``miss_counts[i]`` pairs of the request's miss list. If that list is empty, the first
    ``topk_miss_counts[t]`` pairs of its rows instead; where both are given (the fused indexer does) they name the same
    pairs, so a residency may fill the list alone. A pair with a negative member is skipped.

    Attention: row t of request i sees ``visible = actual_seq_lengths_kv[i] - (actual_seq_lengths_query[i] - 1 - t)``
    logical hot slots and attends, in float32, to the *set* of its non-negative ``topk_dst_slots`` and
    ``[C, visible)``, C being ``num_cache_tokens[i]``. With C = 0 the slots are ignored: it attends to
    ``[0, visible)``. With an empty tail (C = visible) it attends to exactly the slots given. A row of a request of
    length 0, or without any position, yields zeros.

    Args:
        query_rope: [T, N, R].
        query: [T, N, L] multiplied by W_UK.
        actual_seq_lengths_query: [B] cumulative number of rows; the last is T.
        actual_seq_lengths_kv: [B] logical length in the hot buffer seen by the request's last row; 0: inactive.
        num_cache_tokens: [B] C.
        topk_dst_slots: [T, 1, K] logical hot slots.
        topk_src_ids: [T, 1, K] their source positions.
        topk_miss_counts: [T] leading entries of the row that are misses.
        miss_src_ids: [B, M] source positions to fetch.
        miss_dst_slots: [B, M] logical hot slots they go to.
        miss_counts: [B].
        hbm_block_table: [B, any] blocks of the logical hot slots.
        dram_block_table: [B, any] host blocks of the source positions.
        hbm_k_rope: [hot blocks, block size, 1, R], updated in place.
        hbm_kv_cache: [hot blocks, block size, 1, L], updated in place.
        dram_k_rope: [host blocks, block size, R].
        dram_kv_cache: [host blocks, block size, L].
        scale_value: Factor of the scores.
        attention_out: [T, N, L], written in full.
        copied_bytes: Optional [1] int64, receives the bytes copied; they are also reported to the emulated driver.

    Raises:
        ValueError: A dtype, shape, layout or value is illegal, or a position or slot has no block; the message names
            it. Outputs are then undefined.
    """
    _op(
        *(query_rope, query, actual_seq_lengths_query, actual_seq_lengths_kv, num_cache_tokens),
        *(topk_dst_slots, topk_src_ids, topk_miss_counts, miss_src_ids, miss_dst_slots, miss_counts),
        *(hbm_block_table, dram_block_table, hbm_k_rope, hbm_kv_cache, dram_k_rope, dram_kv_cache),
        *(scale_value, attention_out, copied_bytes),
    )


class StepCopyAttention:
    """Copy-SFA for layer after layer of one step: what differs between them is queries, selection and caches.

    The first call is checked in full, those after it only for tensors of the same layout.
    """

    def __init__(self, **constant: Tensor | float) -> None:
        """`constant`: the arguments that all layers share; see `fused_scatter_copy_sparse_flash_attention`."""
        self._constant = constant
        self._prepared: native.Prepared | None = None

    def __call__(self, **varying: Tensor) -> None:
        """`varying`: all other arguments."""
        if varying["query"].device.type != "cpu" or current_backend() != "cpu":
            fused_scatter_copy_sparse_flash_attention(**self._constant, **varying)  # type: ignore[arg-type]
            return
        if self._prepared is None:
            call = CopyAttentionCall(**self._constant, **varying)  # type: ignore[arg-type]
            self._prepared = native.Prepared("copy_sparse_flash_attention", call.checked())
        self._prepared(**{STRUCT_NAMES.get(name, name): tensor for name, tensor in varying.items()})


def _kernel(*arguments: Tensor | float | None) -> None:
    CopyAttentionCall(*arguments).run()  # type: ignore[arg-type]


_op = register(
    "fused_scatter_copy_sparse_flash_attention(Tensor query_rope, Tensor query, Tensor actual_seq_lengths_query, "
    "Tensor actual_seq_lengths_kv, Tensor num_cache_tokens, Tensor topk_dst_slots, Tensor topk_src_ids, "
    "Tensor topk_miss_counts, Tensor miss_src_ids, Tensor miss_dst_slots, Tensor miss_counts, Tensor hbm_block_table, "
    "Tensor dram_block_table, Tensor(a!) hbm_k_rope, Tensor(b!) hbm_kv_cache, Tensor dram_k_rope, "
    "Tensor dram_kv_cache, float scale_value, Tensor(c!) attention_out, Tensor(d!)? copied_bytes=None) -> ()",
    _kernel,
)
