"""The ``ascend`` back end: the operators of ``engine.ops`` on NPU tensors.

The back ends ``cpu`` and ``reference`` run on CPU tensors and are chosen by name; this one is chosen by where the
tensors are, once ``enable`` has been called. It runs vllm-ascend's fused operators where that package is loaded, and
torch_npu's own otherwise (see ``engine.ops.ascend_copy_sfa.copy_then_attend`` for what they cannot do). Sizes are
bound by ``AscendLimits``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.library import Library

from engine.ops import ascend_attention, ascend_copy_sfa, ascend_indexer, ascend_layer, ascend_tail
from engine.ops.ascend_schemas import FUSED_SCHEMAS, NPU_SCHEMAS, check_registered, is_registered

Route = Literal["fused", "unfused"]


@cache
def enable() -> Route:
    """Make operators of ``engine.ops`` run on NPU tensors in this process, after ``import torch_npu``; idempotent.

    Returns:
        ``fused`` if Copy-SFA and LIM are vllm-ascend's; ``unfused`` if that package is not loaded: Copy-SFA is then put
        together from two operators, and LIM raises when called.

    Raises:
        AscendOperatorError: An operator is missing, or has other arguments than this back end passes.
    """
    check_registered(NPU_SCHEMAS)
    fused = is_registered(FUSED_SCHEMAS)
    if fused:
        check_registered(FUSED_SCHEMAS)
    copy_attention = (
        ascend_copy_sfa.fused_scatter_copy_sparse_flash_attention if fused else ascend_copy_sfa.copy_then_attend
    )
    kernels: dict[str, Callable[..., Any]] = {
        "lightning_indexer": ascend_indexer.lightning_indexer,
        "quant_lightning_indexer": ascend_indexer.quant_lightning_indexer,
        "hadamard_quantise": ascend_layer.hadamard_quantise,
        "fused_lightning_indexer_manage": ascend_indexer.fused_lightning_indexer_manage,
        "fused_quant_lightning_indexer_manage": ascend_indexer.fused_quant_lightning_indexer_manage,
        "sparse_flash_attention": ascend_attention.sparse_flash_attention,
        "fused_scatter_copy_sparse_flash_attention": copy_attention,
        "select_with_tail": ascend_tail.select_with_tail,
        "lru_residency": lru_residency,
    }
    for name, kernel in kernels.items():
        _LIBRARY.impl(name, kernel, "PrivateUse1")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return "fused" if fused else "unfused"


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
    *outputs: Tensor,
) -> None:
    """``engine.ops.lru_residency`` on the host, where the residency's state is kept; waits for ``topk_ids``.

    The outputs may be on the host or on the device. Raises ValueError for a state that is on the device.
    """
    state = {
        "last_generation": last_generation,
        "slot_to_token": slot_to_token,
        "last_used": last_used,
        "clock": clock,
    }
    for name, tensor in state.items():
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; legal: cpu, residency is decided on the host")
    results = [torch.empty_like(output, device="cpu") for output in outputs]
    torch.ops.sluice.lru_residency(
        *(argument.cpu() for argument in (topk_ids, stable_prefix, generation, row_index)),
        None if query_ends is None else query_ends.cpu(),
        *state.values(),
        *results,
    )
    for output, result in zip(outputs, results, strict=True):
        output.copy_(result)


_LIBRARY = Library("sluice", "IMPL")  # type: ignore[no-untyped-call]
