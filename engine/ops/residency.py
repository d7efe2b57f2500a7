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

    Invariants, kept by ``lru_residency``: no position occupies two slots of a row; no slot's time of use is later than
    its row's clock; rows a call does not name do not change.
    """

    last_generation: Tensor  # [S] int64, generation the row's contents belong to
    slot_to_token: Tensor  # [S, capacity] int32, position held by each slot, -1: empty
    last_used: Tensor  # [S, capacity] int32, time of each slot's last use, 0: empty since
    clock: Tensor  # [S] int32, advances by 2 in each call that names the row

    @staticmethod
    def empty(rows: int, capacity: int) -> ResidencyState:
        """State of ``rows`` hot buffers that hold nothing; generation -1 must not be used by a request."""
        return ResidencyState(
            torch.full((rows,), -1, dtype=torch.int64),
            torch.full((rows, capacity), -1, dtype=torch.int32),
            torch.zeros(rows, capacity, dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int32),
        )


class Residency(NamedTuple):
    """What one call decided; every element is written on every call."""

    slots: Tensor  # [T, topk] int32, slot of each selected position, -1 where topk_ids is negative
    miss_ids: Tensor  # [B, M] int32, distinct positions to fetch, in order of rows and top-k, padded with -1
    miss_slots: Tensor  # [B, M] int32, the slots they go to, padded with -1
    miss_counts: Tensor  # [B] int32
    hit_counts: Tensor  # [B] int32, places of the top-k that need no fetch: a position that rows share counts for each

    @staticmethod
    def empty(rows: int, topk: int, requests: int | None = None, rows_per_request: int = 1) -> Residency:
        """Uninitialised outputs, to be passed as ``out`` again and again.

        For ``rows`` query rows of ``requests`` requests (None: one each) of up to ``rows_per_request`` rows, so M is
        ``rows_per_request * topk``.
        """
        requests = rows if requests is None else requests
        miss_ids, miss_slots = torch.empty(2, requests, rows_per_request * topk, dtype=torch.int32)
        slots = torch.empty(rows, topk, dtype=torch.int32)
        return Residency(slots, miss_ids, miss_slots, *torch.empty(2, requests, dtype=torch.int32))


def lru_residency(
    topk_ids: Tensor,
    stable_prefix: Tensor,
    generation: Tensor,
    row_index: Tensor,
    state: ResidencyState,
    out: Residency | None = None,
    *,
    query_ends: Tensor | None = None,
) -> Residency:
    """Bring the hot buffers of B requests up to date with what their T query rows attend to next.

    Per request, over the top-k of all its rows together: a selected position p below ``stable_prefix`` is a hit if a
    slot holds it, else a miss; the misses take the slots that have not been used for longest, none of them hit in this
    call (their old contents are lost), so no row loses what another row selected. Hits are used at the row's new clock,
    misses one earlier; empty slots are the oldest; of equally old slots the lower ones are taken. Misses in order of
    rows and top-k get the slots in rising order.
    A position named twice gets one slot and at most one miss. Positions at or above ``stable_prefix`` are not cached
    here: their ``slots`` entry is ``capacity + (p - stable_prefix)``, an address in the caller's tail region, and they
    are neither hit nor miss. Slots that hold such positions (after a rollback) are emptied, and a row of ``state``
    whose ``generation`` is not ``state.last_generation`` is emptied first: contents of another request are never hits.
    The caller must copy the misses before it attends.

    Args:
        topk_ids: [T, topk] int32 source positions; negative entries are skipped.
        stable_prefix: [B] int32, positions below it no longer change; negative counts as 0.
        generation: [B] int64, of the request in the row.
        row_index: [B] int32, row of ``state``, distinct; negative: the request is skipped (-1 and 0 are put out).
        state: Updated in place.
        out: Where to write; fresh tensors if None.
        query_ends: [B] int32, cumulative number of query rows of each request; None: one row each, T = B.

    Returns:
        ``out``.

    Raises:
        ValueError: A dtype, shape, layout or value is illegal (the message names it); capacity or M is below the
            rows of a request times topk; ``last_used`` is later than the row's clock.
    """
    if out is None:
        most = 1 if query_ends is None else rows_per_request(query_ends)
        out = Residency.empty(topk_ids.shape[0], topk_ids.shape[1], len(stable_prefix), most)
    _op(topk_ids, stable_prefix, generation, row_index, query_ends, *state, *out)
    return out


class StepResidency:
    """``lru_residency`` for layer after layer of one step: what differs between them is the top-k and the state.

    The first call is checked in full, those after it only for tensors of the same layout. All write the same ``out``.
    """

    def __init__(
        self, stable_prefix: Tensor, generation: Tensor, row_index: Tensor, query_ends: Tensor, out: Residency
    ) -> None:
        """Arguments as for ``lru_residency``; they are not copied."""
        self._per_request = stable_prefix, generation, row_index, query_ends
        self._out = out
        self._prepared: native.Prepared | None = None

    def __call__(self, topk_ids: Tensor, state: ResidencyState) -> Residency:
        """Returns ``out``; see ``lru_residency``."""
        stable_prefix, generation, row_index, query_ends = self._per_request
        if topk_ids.device.type != "cpu" or current_backend() != "cpu":
            return lru_residency(
                topk_ids, stable_prefix, generation, row_index, state, self._out, query_ends=query_ends
            )
        if self._prepared is None:
            values = _checked(topk_ids, stable_prefix, generation, row_index, query_ends, *state, *self._out)
            self._prepared = native.Prepared("lru_residency", values)
        self._prepared(topk_ids=topk_ids, **state._asdict())
        return self._out


def rows_per_request(query_ends: Tensor) -> int:
    """The most query rows of one request, given the cumulative numbers [B]; 0 without a request."""
    return int(query_ends.diff(prepend=query_ends.new_zeros(1)).max()) if len(query_ends) else 0


def _kernel(*arguments: Tensor | None) -> None:
    values = _checked(*arguments)  # type: ignore[arg-type]  # only query_ends may be None
    if current_backend() == "reference":
        reference.lru_residency(*arguments)  # type: ignore[arg-type]
    else:
        native.call("lru_residency", values)


def _checked(
    topk_ids: Tensor,
    stable_prefix: Tensor,
    generation: Tensor,
    row_index: Tensor,
    query_ends: Tensor | None,
    last_generation: Tensor,
    slot_to_token: Tensor,
    last_used: Tensor,
    clock: Tensor,
    slots: Tensor,
    miss_ids: Tensor,
    miss_slots: Tensor,
    miss_counts: Tensor,
    hit_counts: Tensor,
) -> native.Values:
    """The operator's arguments by the names of the C++ struct. Raises ValueError for illegal layouts."""
    check_tensor("topk_ids", topk_ids, (None, None), torch.int32)
    rows, topk = topk_ids.shape
    if query_ends is not None:
        check_tensor("query_ends", query_ends, (None,), torch.int32)
    requests = rows if query_ends is None else query_ends.shape[0]
    wanted = topk * (1 if query_ends is None else rows_per_request(query_ends))
    check_tensor("stable_prefix", stable_prefix, (requests,), torch.int32)
    check_tensor("generation", generation, (requests,), torch.int64)
    check_tensor("row_index", row_index, (requests,), torch.int32)
    check_tensor("slot_to_token", slot_to_token, (None, None), torch.int32)
    state_rows, capacity = slot_to_token.shape
    check_tensor("last_generation", last_generation, (state_rows,), torch.int64)
    check_tensor("last_used", last_used, (state_rows, capacity), torch.int32)
    check_tensor("clock", clock, (state_rows,), torch.int32)
    check_tensor("slots", slots, (rows, topk), torch.int32)
    check_tensor("miss_ids", miss_ids, (requests, None), torch.int32)
    miss_capacity = miss_ids.shape[1]
    check_tensor("miss_slots", miss_slots, (requests, miss_capacity), torch.int32)
    check_tensor("miss_counts", miss_counts, (requests,), torch.int32)
    check_tensor("hit_counts", hit_counts, (requests,), torch.int32)
    for name, places in (("slot_to_token", capacity), ("miss_ids", miss_capacity)):
        if places < wanted:
            legal = f"at least topk_ids.shape[1] for each row of a request, {wanted}"
            raise ValueError(f"{name} holds {places} slots; legal: {legal}")
    return {
        "topk_ids": topk_ids,
        "query_ends": query_ends,
        "stable_prefix": stable_prefix,
        "generation": generation,
        "row_index": row_index,
        **ResidencyState(last_generation, slot_to_token, last_used, clock)._asdict(),
        **Residency(slots, miss_ids, miss_slots, miss_counts, hit_counts)._asdict(),
        "rows": rows,
        "topk": topk,
        "requests": requests,
        "miss_capacity": miss_capacity,
        "state_rows": state_rows,
        "capacity": capacity,
    }


_op = register(
    "lru_residency(Tensor topk_ids, Tensor stable_prefix, Tensor generation, Tensor row_index, Tensor? query_ends, "
    "Tensor(a!) last_generation, Tensor(b!) slot_to_token, Tensor(c!) last_used, Tensor(d!) clock, "
    "Tensor(e!) slots, Tensor(f!) miss_ids, Tensor(g!) miss_slots, Tensor(h!) miss_counts, Tensor(i!) hit_counts) "
    "-> ()",
    _kernel,
)
