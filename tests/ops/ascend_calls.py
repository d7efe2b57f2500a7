"""Calls of the ascend back end on meta tensors, in a process that has torch_npu's operators, and what they pass on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.ops import ascend_attention, ascend_indexer, ascend_layer

T, B, BLOCKS = 3, 2, 9
BF16, INT8, FP16 = torch.bfloat16, torch.int8, torch.float16


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ids(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def slots() -> Tensor:
    return meta(T, dtype=torch.int64)


CALLS: dict[str, Callable[[], object]] = {
    "lightning_indexer": lambda: ascend_indexer.lightning_indexer(
        meta(T, 64, 128), meta(T, 64), meta(BLOCKS, 128, 1, 128), ids(B, 4), ids(B), ids(B), 2048
    ),
    "quant_lightning_indexer": lambda: ascend_indexer.quant_lightning_indexer(
        *(meta(T, 32, 128, dtype=INT8), meta(T, 32), meta(T, 32, dtype=FP16)),
        *(meta(BLOCKS, 128, 1, 128, dtype=INT8), meta(BLOCKS, 128, 1, dtype=FP16), ids(B, 4), ids(B), ids(B), 2048),
    ),
    "sparse_flash_attention": lambda: ascend_attention.sparse_flash_attention(
        *(meta(T, 4, 512), meta(T, 4, 64), meta(BLOCKS, 128, 1, 512), meta(BLOCKS, 128, 1, 64)),
        *(ids(B, 4), ids(B), ids(T, 2048), 0.07),
    ),
    "write_kv": lambda: ascend_layer.write_kv(
        *(meta(T, 576), meta(512), meta(T, 64), meta(T, 64), slots()),
        *(meta(BLOCKS, 128, 1, 64), meta(BLOCKS, 128, 1, 512), 1e-6),
    ),
    "write_rows": lambda: ascend_layer.write_rows(meta(BLOCKS, 128, 1, 128), slots(), meta(T, 128)),
    "rope_interleaved": lambda: ascend_layer.rope_interleaved(meta(T, 16, 64), meta(T, 64), meta(T, 64)),
    "rope_half_split": lambda: ascend_layer.rope_half_split(meta(T, 16, 64), meta(T, 64), meta(T, 64)),
    "rms_norm": lambda: ascend_layer.rms_norm(meta(T, 512), meta(512), 1e-5),
    "hadamard_quantise": lambda: ascend_layer.hadamard_quantise(meta(T, 64, 128)),
}


class Recorder(TorchDispatchMode):
    """Notes calls of operators in namespace npu: [name, {argument: what it was given}], defaults left out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, object]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func.namespace == "npu":
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.calls.append((func._opname, {name: described(value) for name, value in given.items()}))
        return func(*args, **(kwargs or {}))


def described(value: object) -> object:
    """JSON of a value: a tensor is its dtype and shape, a tuple is a list."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return [described(item) for item in value] if isinstance(value, tuple) else value


def record(name: str) -> list[object]:
    """Runs a call; returns the npu operators it called and its result."""
    with Recorder() as recorder:
        result = CALLS[name]()
    return [recorder.calls, described(result)]
