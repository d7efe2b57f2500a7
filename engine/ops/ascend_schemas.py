"""The Ascend operators that the back end calls, with the schemas it is written against.

An operator's arguments may change from one release of its package to the next. ``check_registered`` compares what a
process really has with what is stored here, once, before the first call: a drift is an error at start and not a wrong
argument later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

TORCH_NPU_VERSION: Final = "2.13.0"
"""The torch_npu wheel that ``NPU_SCHEMAS`` was taken from."""


class AscendOperatorError(RuntimeError):
    """An Ascend operator is missing, or its arguments are not those this back end passes."""


_LAST = "9223372036854775807"  # sparse_mode 0 and 3 do not read pre_tokens and next_tokens

NPU_SCHEMAS: Final = (
    "npu::npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', str layout_key='BSND', "
    f"int sparse_count=2048, int sparse_mode=3, int pre_tokens={_LAST}, int next_tokens={_LAST}, "
    "bool return_value=False) -> (Tensor, Tensor)",
    "npu::npu_quant_lightning_indexer(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
    "Tensor key_dequant_scale, int query_quant_mode, int key_quant_mode, *, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', str layout_key='BSND', "
    f"int sparse_count=2048, int sparse_mode=3, int pre_tokens={_LAST}, int next_tokens={_LAST}, "
    "int? query_dtype=None, int? key_dtype=None) -> Tensor",
    "npu::npu_sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, "
    "float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, "
    f"str layout_query='BSND', str layout_kv='BSND', int sparse_mode=3, int pre_tokens={_LAST}, "
    f"int next_tokens={_LAST}, int attention_mode=0, bool return_softmax_lse=False, Tensor? sinks=None) "
    "-> (Tensor, Tensor, Tensor)",
    "npu::npu_kv_rmsnorm_rope_cache(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor k_cache, "
    "Tensor ckv_cache, *, Tensor? k_rope_scale=None, Tensor? c_kv_scale=None, Tensor? k_rope_offset=None, "
    "Tensor? c_kv_offset=None, Tensor? v=None, float epsilon=1e-05, str cache_mode='Norm', bool is_output_kv=False) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "npu::npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)",
    "npu::npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    "npu::npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
    "npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu::npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, "
    "int? dst_type=None, str quant_mode='pertoken', float dst_type_max=0.) -> (Tensor, Tensor)",
)
"""torch_npu's own operators: the route without fused operators, and what a layer does around attention."""

_MANAGE_ARGUMENTS = (
    "(Tensor index_weights, Tensor query_dequant_scale, Tensor query, Tensor index_key_dequant_scale, "
    "Tensor index_key_cache, Tensor index_block_table, Tensor actual_seq_lengths_query, "
    "Tensor actual_seq_lengths_key, Tensor offload_seq_lengths_key, Tensor num_cache_tokens, Tensor request_state, "
    "Tensor req_pool_entries, Tensor(a!) cache_slots_pool, Tensor(b!) topk_src_ids, Tensor(c!) topk_dst_slots, "
    "Tensor(d!) topk_miss_counts, Tensor(e!) miss_src_ids, Tensor(f!) miss_dst_slots, Tensor(g!) miss_counts) -> ()"
)

FUSED_SCHEMAS: Final = (
    f"_C_ascend::npu_fused_lightning_indexer_manage{_MANAGE_ARGUMENTS}",
    f"_C_ascend::npu_fused_quant_lightning_indexer_manage{_MANAGE_ARGUMENTS}",
    "_C_ascend::npu_fused_scatter_copy_sparse_flash_attention(Tensor query_rope, Tensor query, "
    "Tensor actual_seq_lengths_query, Tensor actual_seq_lengths_kv, Tensor num_cache_tokens, Tensor topk_dst_slots, "
    "Tensor topk_src_ids, Tensor topk_miss_counts, Tensor miss_src_ids, Tensor miss_dst_slots, Tensor miss_counts, "
    "Tensor hbm_block_table, Tensor dram_block_table, Tensor(a!) hbm_k_rope, Tensor(b!) hbm_kv_cache, "
    "Tensor dram_k_rope, Tensor dram_kv_cache, float scale_value, Tensor(c!) attention_out) -> ()",
)
"""The fused operators of vllm-ascend's custom operator package. Which arguments it marks as written is not compared."""


def operator(name: str) -> Callable[..., Any]:
    """The default overload of operator ``namespace::name``.

    Raises AscendOperatorError, with the package that registers it, when this process has no such operator.
    """
    namespace, _, short = name.partition("::")
    try:
        overload: Callable[..., Any] = getattr(getattr(torch.ops, namespace), short).default
    except AttributeError:
        package = f"torch_npu=={TORCH_NPU_VERSION}" if namespace == "npu" else "vllm-ascend's custom operators"
        raise AscendOperatorError(f"torch.ops.{namespace}.{short} is not registered: import {package} first") from None
    return overload


def is_registered(schemas: Iterable[str]) -> bool:
    """Whether this process has every operator of ``schemas``, with whatever arguments."""
    return all(torch._C._dispatch_has_kernel(schema.partition("(")[0]) for schema in schemas)


def check_registered(schemas: Iterable[str]) -> None:
    """Raise AscendOperatorError unless each operator is registered with the arguments and results of its schema.

    Names, order, types, defaults and keyword-only marks are compared. The message lists every difference.
    """
    differences = [difference for schema in schemas for difference in _differences(schema)]
    if differences:
        raise AscendOperatorError("Ascend operators differ from those supported: " + "; ".join(differences))


def _differences(text: str) -> list[str]:
    expected, found = torch._C.parse_schema(text), operator(text.partition("(")[0])._schema  # type: ignore[attr-defined]
    parts = [
        (f"argument {position}", _argument(expected.arguments, position), _argument(found.arguments, position))
        for position in range(max(len(expected.arguments), len(found.arguments)))
    ]
    parts.append(("results", _results(expected), _results(found)))
    return [
        f"{expected.name}: {part} is {given}, expected {wanted}" for part, wanted, given in parts if given != wanted
    ]


def _argument(arguments: list[Any], position: int) -> str:
    if position >= len(arguments):
        return "absent"
    argument = arguments[position]
    default = f"={argument.default_value!r}" if argument.has_default_value() else ""
    return f"{argument.type} {argument.name}{default}{' (keyword only)' if argument.kwarg_only else ''}"


def _results(schema: Any) -> str:
    return "(" + ", ".join(str(result.type) for result in schema.returns) + ")"
