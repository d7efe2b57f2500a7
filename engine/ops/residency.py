"""LRU residency: which selected positions are in a request's hot buffer, and where the others go."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.ops import native, reference
from engine.ops.backends import current_backend
from engine.ops.checks import check_tensor
from engine.ops.registry import register


class ResidencyState(NamedTuple):
    """Persistent state of S hot buffers of ``capacity`` slots each; one row serves one request at a time.

    Invariants, kept by ``lru_residency``: each ``lru_order`` row is a permutation of its slots, oldest first; no
    position occupies two slots of a row; rows a call does not name do not change.
    """

    last_generation: Tensor  # [S] int64, generation the row's contents belong to
    slot_to_token: Tensor  # [S, capacity] int32, position held by each slot, -1: empty
    lru_order: Tensor  # [S, capacity] int32

    @staticmethod
    def empty(rows: int, capacity: int) -> ResidencyState:
        """State of ``rows`` hot buffers that hold nothing; generation -1 must not be used by a request."""
        return ResidencyState(
            torch.full((rows,), -1, dtype=torch.int64),
            torch.full((rows, capacity), -1, dtype=torch.int32),
            torch.arange(capacity, dtype=torch.int32).repeat(rows, 1),
        )


class Residency(NamedTuple):
    """What one call decided; every element is written on every call."""

    slots: Tensor  # [B, topk] int32, slot of each selected position, -1 where topk_ids is negative
    miss_ids: Tensor  # [B, topk] int32, distinct positions to fetch, in top-k order, padded with -1
    miss_slots: Tensor  # [B, topk] int32, the slots they go to, padded with -1
    miss_counts: Tensor  # [B] int32

    @staticmethod
    def empty(rows: int, topk: int) -> Residency:
        """Uninitialised outputs for ``rows`` rows, to be passed as ``out`` again and again."""
        slots, miss_ids, miss_slots = torch.empty(3, rows, topk, dtype=torch.int32)
        return Residency(slots, miss_ids, miss_slots, torch.empty(rows, dtype=torch.int32))


def lru_residency(
    topk_ids: Tensor,
    stable_prefix: Tensor,
    generation: Tensor,
    row_index: Tensor,
    state: ResidencyState,
    out: Residency | None = None,
) -> Residency:
    """Bring the hot buffers of B rows up to date with what they attend to next.

    Per row: a selected position p below ``stable_prefix`` is a hit if a slot holds it, else a miss that takes the
    oldest slot not hit in this call (its old contents are lost). The order of use becomes untouched slots, then this
    call's misses, then its hits. A position named twice gets one slot and at most one miss. Positions at or above
    ``stable_prefix`` are not cached here: their ``slots`` entry is ``capacity + (p - stable_prefix)``, an address in
    the caller's tail region, and they are neither hit nor miss. Slots that hold such positions (after a rollback) are
    emptied, and a row whose ``generation`` is not ``state.last_generation`` is emptied first: contents of another
    request are never hits. The caller must copy the misses before it attends.

    Args:
        topk_ids: [B, topk] int32 source positions; negative entries are skipped.
        stable_prefix: [B] int32, positions below it no longer change; negative counts as 0.
        generation: [B] int64, of the request in the row.
        row_index: [B] int32, row of ``state``, distinct; negative: the row is skipped (-1 and 0 are put out).
        state: Updated in place.
        out: Where to write; fresh tensors if None.

    Returns:
        ``out``.

    Raises:
        ValueError: A dtype, shape, layout or value is illegal (the message names it); capacity is below topk; an
            ``lru_order`` row is no permutation.
    """
    result = Residency.empty(*topk_ids.shape) if out is None else out
    _op(topk_ids, stable_prefix, generation, row_index, *state, *result)
    return result


def _kernel(
    topk_ids: Tensor,
    stable_prefix: Tensor,
    generation: Tensor,
    row_index: Tensor,
    last_generation: Tensor,
    slot_to_token: Tensor,
    lru_order: Tensor,
    slots: Tensor,
    miss_ids: Tensor,
    miss_slots: Tensor,
    miss_counts: Tensor,
) -> None:
    check_tensor("topk_ids", topk_ids, (None, None), torch.int32)
    rows, topk = topk_ids.shape
    check_tensor("stable_prefix", stable_prefix, (rows,), torch.int32)
    check_tensor("generation", generation, (rows,), torch.int64)
    check_tensor("row_index", row_index, (rows,), torch.int32)
    check_tensor("slot_to_token", slot_to_token, (None, None), torch.int32)
    state_rows, capacity = slot_to_token.shape
    check_tensor("last_generation", last_generation, (state_rows,), torch.int64)
    check_tensor("lru_order", lru_order, (state_rows, capacity), torch.int32)
    for name, tensor in (("slots", slots), ("miss_ids", miss_ids), ("miss_slots", miss_slots)):
        check_tensor(name, tensor, (rows, topk), torch.int32)
    check_tensor("miss_counts", miss_counts, (rows,), torch.int32)
    if capacity < topk:
        raise ValueError(f"slot_to_token holds {capacity} slots; legal: at least topk_ids.shape[1], {topk}")
    state, out = ResidencyState(last_generation, slot_to_token, lru_order), (slots, miss_ids, miss_slots, miss_counts)
    if current_backend() == "reference":
        reference.lru_residency(topk_ids, stable_prefix, generation, row_index, *state, *out)
        return
    native.call(
        "lru_residency",
        {
            "topk_ids": topk_ids,
            "stable_prefix": stable_prefix,
            "generation": generation,
            "row_index": row_index,
            **state._asdict(),
            **Residency(*out)._asdict(),
            "rows": rows,
            "topk": topk,
            "state_rows": state_rows,
            "capacity": capacity,
        },
    )


_op = register(
    "lru_residency(Tensor topk_ids, Tensor stable_prefix, Tensor generation, Tensor row_index, "
    "Tensor(a!) last_generation, Tensor(b!) slot_to_token, Tensor(c!) lru_order, Tensor(d!) slots, "
    "Tensor(e!) miss_ids, Tensor(f!) miss_slots, Tensor(g!) miss_counts) -> ()",
    _kernel,
)
