"""``sluice status``: one snapshot of a deployment, as tables for people or as JSON for scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sluice.v1 import client_pb2, common_pb2

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_HEALTH_STYLE = {"ready": "green", "starting": "yellow", "lost": "bold red"}


def format_bytes(count: float) -> str:
    """For example 1536 -> "1.5 KiB"."""
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def status_as_json(status: client_pb2.GetStatusResponse) -> dict[str, Any]:
    """Field names as in the .proto files, zero values included; byte and unit counts as JSON numbers."""
    tree: dict[str, Any] = MessageToDict(
        status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for pool in _all_pools(tree):
        pool["used"], pool["total"] = int(pool["used"]), int(pool["total"])  # uint64 arrives as text
    return tree


def _all_pools(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from tree["pools"]
    for worker in tree["workers"]:
        yield from worker.get("status", {}).get("pools", [])


def status_view(status: client_pb2.GetStatusResponse) -> RenderableType:
    """Workers, their pools, and the deployment's totals."""
    ready = Text("ready", "green") if status.ready else Text("not ready", "bold red")
    head = Text.assemble(
        ("model ", "dim"),
        status.model,
        ("  context ", "dim"),
        f"{status.max_model_len} tokens",
        ("  state ", "dim"),
        ready,
        ("  in flight ", "dim"),
        str(status.requests_in_flight),
        ("  up ", "dim"),
        f"{status.uptime_seconds:.0f} s",
    )
    parts: list[RenderableType] = [head, _topology(status.workers), _pools(status)]
    if status.counters:
        parts.append(Text("  ".join(f"{name} {value:g}" for name, value in sorted(status.counters.items())), "dim"))
    return Group(*parts)


def _topology(workers: Iterable[client_pb2.WorkerState]) -> Table:
    table = Table(title="workers")
    for name in ("worker", "tp", "device", "health", "running", "waiting", "pid", "address"):
        table.add_column(name, no_wrap=name in ("worker", "address"))
    for worker in sorted(workers, key=lambda w: (w.info.role, w.info.worker_id)):
        info, status = worker.info, worker.status
        health = worker.health + (f" ({status.detail})" if status.detail and worker.health != "ready" else "")
        table.add_row(
            info.worker_id,
            f"{info.tp_rank}/{info.tp_size}",
            str(info.device_id),
            Text(health, _HEALTH_STYLE.get(worker.health, "")),
            str(status.running),
            str(status.waiting),
            str(info.pid),
            info.grpc_address,
        )
    return table


def _pools(status: client_pb2.GetStatusResponse) -> Table:
    table = Table("owner", "pool", "used", "total", "", title="pools")
    rows = [(worker.info.worker_id, pool) for worker in status.workers for pool in worker.status.pools]
    for owner, pool in [*rows, *(("deployment", pool) for pool in status.pools)]:
        table.add_row(owner, pool.name, _amount(pool.used, pool), _amount(pool.total, pool), _share(pool))
    return table


def _amount(value: int, pool: common_pb2.PoolUsage) -> str:
    return format_bytes(value) if pool.unit == "bytes" else f"{value} {pool.unit}"


def _share(pool: common_pb2.PoolUsage) -> str:
    return f"{pool.used / pool.total:.0%}" if pool.total else ""
