"""The safetensors files of a checkpoint: which there are, and whether they are whole. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


class CheckpointError(ValueError):
    """A checkpoint lacks a tensor or holds one we cannot use: names the directory, the tensor and what is needed."""


def weight_files(model_dir: Path) -> list[Path]:
    """All files with tensors. Raises CheckpointError: there are none, or the index names missing files."""
    names = indexed_tensors(model_dir)
    if names is not None:
        return sorted(set(names.values()))
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{model_dir}: no *.safetensors files; needed: model.safetensors or {_INDEX}")
    return files


def indexed_tensors(model_dir: Path) -> dict[str, Path] | None:
    """The file of each tensor, by the index of a sharded checkpoint; None if it has no index.

    Raises CheckpointError: it is no index, or it names missing files.
    """
    index = model_dir / _INDEX
    if not index.is_file():
        return None
    weight_map = _weight_map(index)
    missing = sorted({file for file in weight_map.values() if not (model_dir / file).is_file()})
    if missing:
        raise CheckpointError(f"{index}: names files that do not exist: {', '.join(missing)}")
    return {name: model_dir / file for name, file in weight_map.items()}


def check_weight_files(model_dir: Path) -> None:
    """Reads headers only. Raises CheckpointError, with one line: a file is missing, cut short or no safetensors."""
    for path in weight_files(model_dir):
        try:
            _check_size(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _check_size(path: Path) -> None:
    """A header's length in 8 bytes, the header, which says where each tensor ends, and the tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > _LONGEST_HEADER:
            raise CheckpointError(f"{path}: is not a safetensors file")
        text = file.read(length)
    if len(text) < length:
        raise CheckpointError(f"{path}: is cut short: its header takes {8 + length} bytes, the file has {size}")
    try:
        header: dict[str, Any] = json.loads(text)
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise CheckpointError(f"{path}: is not a safetensors file") from None
    need = 8 + length + max(ends, default=0)
    if size < need:
        raise CheckpointError(f"{path}: is cut short: its tensors need {need} bytes, the file has {size}")


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name to file name. Raises CheckpointError for a file that is no index."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: is no index of a sharded checkpoint: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map each tensor's name to a file's name")
    return weight_map
