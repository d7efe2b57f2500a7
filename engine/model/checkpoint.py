"""Lazy access to the tensors of a safetensors checkpoint, single-file or sharded, plain or FP8."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.weight_files import CheckpointError, indexed_tensors, weight_files

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALE_SUFFIX = "_scale_inv"


class Checkpoint:
    """Reads slices of named tensors without ever holding a whole file; close it (or use `with`) after loading.

    FP8 weights (`X.weight` in float8_e4m3fn with float32 `X.weight_scale_inv`, one scale per block) come out as
    value * scale, computed in float32.
    """

    def __init__(self, model_dir: str | Path, quant_block: tuple[int, int] | None = None) -> None:
        """Open the index of `model_dir`; `quant_block` is the [rows, columns] block of FP8 weights, if any.

        Raises:
            CheckpointError: no safetensors files, or an index that names missing files.
        """
        self._dir = Path(model_dir)
        self._quant_block = quant_block
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        self._where = self._locate()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files; idempotent."""
        self._files.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """A contiguous copy of tensor `name`, of full `shape`, cut to half-open `rows` and `columns` ranges.

        Raises:
            CheckpointError: the tensor is missing, has another shape, holds no floating-point numbers, or is FP8
                without scales.
        """
        if name not in self._where:
            raise CheckpointError(f"{self._dir}: tensor {name} is missing; needed with shape {list(shape)}")
        source = self._open(self._where[name]).get_slice(name)
        found = tuple(source.get_shape())
        if found != shape:
            raise CheckpointError(f"{self._dir}: tensor {name} has shape {list(found)}; needed: {list(shape)}")
        row_range = rows or (0, shape[0])
        if len(shape) == 1:
            return self._owned(name, source[row_range[0] : row_range[1]], dtype)
        column_range = columns or (0, shape[1])
        part: Tensor = source[row_range[0] : row_range[1], column_range[0] : column_range[1]]
        if part.dtype == torch.float8_e4m3fn:
            part = self._dequantise(name, part, shape, row_range, column_range)
        return self._owned(name, part, dtype)

    def _owned(self, name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of `dtype` that shares no memory with the mapped file."""
        if part.dtype not in _DTYPES:
            legal = ", ".join(str(legal).removeprefix("torch.") for legal in _DTYPES)
            found = str(part.dtype).removeprefix("torch.")
            raise CheckpointError(f"{self._dir}: tensor {name} holds {found}; legal: {legal}, or float8_e4m3fn weights")
        return part.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def _dequantise(
        self, name: str, part: Tensor, shape: tuple[int, ...], rows: tuple[int, int], columns: tuple[int, int]
    ) -> Tensor:
        if self._quant_block is None:
            raise CheckpointError(f"{self._dir}: tensor {name} is FP8 but config.json has no quantization_config")
        height, width = self._quant_block
        scales = self.read(name + _SCALE_SUFFIX, (-(-shape[0] // height), -(-shape[1] // width)), torch.float32)
        row_block = torch.arange(*rows) // height
        column_block = torch.arange(*columns) // width
        return part.to(torch.float32) * scales[row_block][:, column_block]

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error
        return self._files[path]

    def _locate(self) -> dict[str, Path]:
        """Which file holds each tensor: by the index of a sharded checkpoint, else by the files' own headers."""
        indexed = indexed_tensors(self._dir)
        if indexed is not None:
            return indexed
        files = weight_files(self._dir)
        return {name: path for path in files for name in self._open(path).keys()}  # noqa: SIM118 (not a mapping)
