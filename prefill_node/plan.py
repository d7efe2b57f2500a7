"""Which layer lives in which physical layer buffer. Pure: no tensors, no I/O.

A prefill device does not keep every layer's KV. `I` independent layers have a buffer of their own; the `R = N - I`
others take turns in `B` shared ones, round-robin in layer order, so that the device holds `I + min(B, R)` buffers
instead of `N`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class LayerBufferPlan:
    """The assignment of `num_layers` layers to physical slots.

    Invariants: every layer is in exactly one slot; an independent layer is alone in its slot; a slot's layers are in
    ascending order, so a slot is always overwritten by a later layer of the same step.
    """

    slots: tuple[tuple[int, ...], ...]  # layers of each slot: independent ones first, then the shared ones
    slot_of_layer: tuple[int, ...]
    prefetch_of: Mapping[int, int]  # layer -> the layer whose buffer it takes over
    independent: tuple[int, ...]  # ascending

    @property
    def num_layers(self) -> int:
        return len(self.slot_of_layer)

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    @property
    def has_reuse(self) -> bool:
        """Whether any buffer holds more than one layer in turn."""
        return self.num_slots < self.num_layers

    @property
    def footprint(self) -> float:
        """Layer buffers held, as a share of all layers: `(I + min(B, R)) / N`."""
        return self.num_slots / self.num_layers

    def is_reused(self, layer: int) -> bool:
        """Whether the layer's buffer is overwritten by others, so that its earlier rows must come from the pool."""
        return len(self.slots[self.slot_of_layer[layer]]) > 1


def plan_layer_buffers(num_layers: int, independent: Sequence[int] | Literal["all"], shared: int) -> LayerBufferPlan:
    """Assigns layers to buffers: slot `s` of the shared ones gets `reused[s::B]`.

    `independent` lists layer numbers (negative ones count from the end) or is `"all"`; `shared` is B.
    Raises TypeError for values of the wrong kind and ValueError for layers or counts out of range.
    """
    if not _is_int(num_layers):
        raise TypeError(f"num_layers = {num_layers!r} must be an integer")
    if num_layers < 1:
        raise ValueError(f"num_layers = {num_layers} must be at least 1")
    if not _is_int(shared):
        raise TypeError(f"prefill.shared_buffers = {shared!r} must be an integer of at least 1")
    if shared < 1:
        raise ValueError(f"prefill.shared_buffers = {shared} must be at least 1")
    own = _independent_layers(num_layers, independent)
    reused = [layer for layer in range(num_layers) if layer not in own]
    buffers = min(shared, len(reused))
    slots = (*((layer,) for layer in own), *(tuple(reused[s::buffers]) for s in range(buffers)))
    slot_of = {layer: slot for slot, layers in enumerate(slots) for layer in layers}
    return LayerBufferPlan(
        slots=slots,
        slot_of_layer=tuple(slot_of[layer] for layer in range(num_layers)),
        prefetch_of=MappingProxyType(dict(zip(reused[buffers:], reused, strict=False))),
        independent=own,
    )


def _independent_layers(num_layers: int, independent: Sequence[int] | str) -> tuple[int, ...]:
    field, legal = "prefill.independent_layers", f'a list of layers in {-num_layers}..{num_layers - 1}, or "all"'
    if independent == "all":
        return tuple(range(num_layers))
    if isinstance(independent, str) or not isinstance(independent, Sequence):
        raise TypeError(f"{field} = {independent!r} must be {legal}")
    layers: set[int] = set()
    for layer in independent:
        if isinstance(layer, str) or not _is_int(layer):
            raise TypeError(f"{field}: {layer!r} is not a layer number; give {legal}")
        if not -num_layers <= layer < num_layers:
            raise ValueError(f"{field}: the model has no layer {layer}; give {legal}")
        layers.add(layer % num_layers)
    return tuple(sorted(layers))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
