"""The KV layout both sides of a transfer must share, how it is compared, and the byte sizes which follow from it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

from sluice.v1 import registry_pb2, wire_pb2

Kind: TypeAlias = "wire_pb2.TensorKind.ValueType"

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
INDEXER_DTYPES = ("model", "int8")
SCALE_BYTES = 2  # one float16 per key row when the indexer keys are int8
MAIN_KINDS = (wire_pb2.TENSOR_KIND_CKV, wire_pb2.TENSOR_KIND_K_ROPE)
INDEXER_KINDS = (wire_pb2.TENSOR_KIND_INDEXER_KEY, wire_pb2.TENSOR_KIND_INDEXER_SCALE)


class LayoutMismatch(ValueError):
    """Two sides of a transfer differ; the text names each differing field with both values."""


def kv_layout(
    *,
    fingerprint: str,
    dtype: str,
    block_size: int,
    num_layers: int,
    kv_lora_rank: int,
    rope_dim: int,
    index_dim: int,
    indexer_layers: Sequence[int],
    protocol: str,
    indexer_dtype: str = "model",
) -> registry_pb2.KvLayout:
    """A checked layout. ``block_size`` in tokens, dims in elements, ``indexer_layers``: layers owning an indexer.

    Raises ValueError naming the field, its value and the legal ones.
    """
    sizes = {
        "block_size": block_size,
        "num_layers": num_layers,
        "kv_lora_rank": kv_lora_rank,
        "rope_dim": rope_dim,
        "index_dim": index_dim,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"KV layout: {name} = {value} must be at least 1")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"KV layout: dtype = {dtype!r}; legal: {', '.join(DTYPE_BYTES)}")
    if indexer_dtype not in INDEXER_DTYPES:
        raise ValueError(f"KV layout: indexer_dtype = {indexer_dtype!r}; legal: {', '.join(INDEXER_DTYPES)}")
    outside = [layer for layer in indexer_layers if not 0 <= layer < num_layers]
    if outside or len(set(indexer_layers)) != len(indexer_layers):
        raise ValueError(
            f"KV layout: indexer_layers = {list(indexer_layers)} must be distinct layers of 0..{num_layers - 1}"
        )
    return registry_pb2.KvLayout(
        fingerprint=fingerprint,
        dtype=dtype,
        indexer_dtype=indexer_dtype,
        indexer_layers=sorted(indexer_layers),
        protocol=protocol,
        **sizes,
    )


def kinds_of(layout: registry_pb2.KvLayout, layer: int) -> tuple[Kind, ...]:
    """The tensors which make up ``layer``, in the order they are read."""
    if layer not in layout.indexer_layers:
        return MAIN_KINDS
    return MAIN_KINDS + (INDEXER_KINDS if layout.indexer_dtype == "int8" else INDEXER_KINDS[:1])


def kind_name(kind: int) -> str:
    """For error texts; also of a number no TensorKind has, as a peer may send."""
    name = wire_pb2.TensorKind.DESCRIPTOR.values_by_number.get(kind)
    return name.name.removeprefix("TENSOR_KIND_").lower() if name is not None else f"unknown tensor kind {kind}"


def indexer_token_bytes(index_dim: int, element_bytes: int, indexer_dtype: str) -> tuple[int, int]:
    """Bytes of one token's index key and of its scale, in one layer; ``element_bytes``: of the model's dtype."""
    return (index_dim, SCALE_BYTES) if indexer_dtype == "int8" else (index_dim * element_bytes, 0)


def block_bytes(layout: registry_pb2.KvLayout, kind: Kind) -> int:
    """Bytes of one block of one layer's tensor of this kind."""
    element = DTYPE_BYTES[layout.dtype]
    key, scale = indexer_token_bytes(layout.index_dim, element, layout.indexer_dtype)
    row = {
        wire_pb2.TENSOR_KIND_CKV: layout.kv_lora_rank * element,
        wire_pb2.TENSOR_KIND_K_ROPE: layout.rope_dim * element,
        wire_pb2.TENSOR_KIND_INDEXER_KEY: key,
        wire_pb2.TENSOR_KIND_INDEXER_SCALE: scale,
    }
    return layout.block_size * row[kind]


def layout_differences(
    ours: registry_pb2.KvLayout, theirs: registry_pb2.KvLayout, our_name: str, their_name: str
) -> list[str]:
    """One line per differing field, naming both values and whose they are; empty when the layouts fit."""
    lines = []
    for field in registry_pb2.KvLayout.DESCRIPTOR.fields:
        mine, other = _plain(getattr(ours, field.name)), _plain(getattr(theirs, field.name))
        if mine != other:
            lines.append(f"{field.name}: {mine} ({our_name}) != {other} ({their_name})")
    return lines


def require_same_layout(
    ours: registry_pb2.KvLayout, theirs: registry_pb2.KvLayout, our_name: str, their_name: str
) -> None:
    """Raises LayoutMismatch when the two differ."""
    differences = layout_differences(ours, theirs, our_name, their_name)
    if differences:
        raise LayoutMismatch("KV layouts differ: " + "; ".join(differences))


def layout_hash(layout: registry_pb2.KvLayout) -> str:
    """16 hex digits, equal for equal layouts in every process (unlike ``hash``)."""
    text = "|".join(
        f"{field.name}={_plain(getattr(layout, field.name))}" for field in registry_pb2.KvLayout.DESCRIPTOR.fields
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(value: object) -> object:
    return value if isinstance(value, str | int) else list(value)  # type: ignore[call-overload]
