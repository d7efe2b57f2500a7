"""Does a worker that registers fit the ones already here? Pure checks; every refusal names both values."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.v1 import common_pb2, registry_pb2

from transfer.layout import layout_differences

_ROLES = {common_pb2.WORKER_ROLE_PREFILL: "prefill", common_pb2.WORKER_ROLE_DECODE: "decode"}


class RegistrationRefused(ValueError):
    """The worker cannot take part in this deployment; the text says which field and what it should be."""


def check_info(info: registry_pb2.WorkerInfo) -> None:
    """Raises RegistrationRefused when the registration is malformed by itself."""
    for name in ("worker_id", "group", "epoch", "grpc_address"):
        if not getattr(info, name):
            raise RegistrationRefused(f"{name}: required, but empty (worker {info.worker_id or '?'!r})")
    if info.role not in _ROLES:
        raise RegistrationRefused(f"{info.worker_id}: role = {info.role}; legal: PREFILL (1), DECODE (2)")
    if info.tp_size < 1 or info.tp_rank >= info.tp_size:
        raise RegistrationRefused(
            f"{info.worker_id}: tp_rank = {info.tp_rank} of tp_size = {info.tp_size}; legal: 0 to tp_size - 1"
        )


def check_fits(info: registry_pb2.WorkerInfo, others: Sequence[registry_pb2.WorkerInfo]) -> None:
    """Compares a newcomer with every live worker but its own predecessor. Raises RegistrationRefused."""
    for other in others:
        _check_layout(info, other)
        _check_tp(info, other)
        _check_place(info, other)


def _check_layout(info: registry_pb2.WorkerInfo, other: registry_pb2.WorkerInfo) -> None:
    differences = layout_differences(info.layout, other.layout, info.worker_id, other.worker_id)
    if differences:
        raise RegistrationRefused(
            f"{info.worker_id}: the KV layout differs from {other.worker_id}'s, but all workers of a deployment must "
            f"agree: {'; '.join(differences)}"
        )


def _check_tp(info: registry_pb2.WorkerInfo, other: registry_pb2.WorkerInfo) -> None:
    if info.role == other.role:
        if info.tp_size != other.tp_size:
            raise RegistrationRefused(
                f"{info.worker_id}: tp_size = {info.tp_size}, but {other.worker_id} has {other.tp_size}; "
                f"all {_ROLES[info.role]} groups must have the same"
            )
        return
    prefill, decode = (info, other) if info.role == common_pb2.WORKER_ROLE_PREFILL else (other, info)
    if prefill.tp_size % decode.tp_size:
        raise RegistrationRefused(
            f"{info.worker_id}: prefill tp_size = {prefill.tp_size} ({prefill.worker_id}) must be a multiple of "
            f"decode tp_size = {decode.tp_size} ({decode.worker_id})"
        )


def _check_place(info: registry_pb2.WorkerInfo, other: registry_pb2.WorkerInfo) -> None:
    def place(one: registry_pb2.WorkerInfo) -> tuple[int, str, int, int]:
        return one.role, one.group, one.dp_rank, one.tp_rank

    if place(info) == place(other):
        raise RegistrationRefused(
            f"{info.worker_id}: {_ROLES[info.role]} group {info.group!r} dp_rank {info.dp_rank} tp_rank {info.tp_rank} "
            f"is already taken by {other.worker_id}"
        )
