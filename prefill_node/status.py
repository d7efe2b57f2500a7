"""What a prefill worker says of itself in heartbeats and status calls."""

from __future__ import annotations

from sluice.v1 import common_pb2

from prefill_node.leader import Snapshot
from prefill_node.pool_health import HealthCounters
from prefill_node.pool_loader import LoadCounters
from prefill_node.pool_saver import SaveCounters
from prefill_node.publisher import PublisherCounters
from prefill_node.reuse_gate import GateCounters
from prefill_node.scheduler import INDEXER, MAIN
from prefill_node.shape import POOL, PrefillShape
from transfer.pool_monitor import PoolUsage

_POOLS = {MAIN: "kv_blocks", INDEXER: "indexer_blocks", POOL: "pool_blocks"}


def add_shape(status: common_pb2.WorkerStatus, shape: PrefillShape) -> None:
    """The layer buffers of every TP rank, and the main KV in them."""
    status.gauges["layer_buffers"] = shape.plan.num_slots
    status.gauges["layers"] = shape.plan.num_layers
    status.gauges["main_kv_bytes"] = shape.main_kv_bytes
    status.gauges["indexer_bytes"] = shape.indexer_bytes
    status.gauges["main_kv_bytes_all_resident"] = shape.main_kv_bytes_all_resident
    status.gauges["max_prompt_tokens"] = shape.max_prompt_tokens


def add_scheduling(status: common_pb2.WorkerStatus, snapshot: Snapshot, max_waiting: int) -> None:
    """Requests, pools and steps; rank 0 only, which schedules for its group."""
    status.running, status.waiting = snapshot.running, snapshot.waiting
    for cache, usage in snapshot.usage.items():
        status.pools.add(name=_POOLS[cache], used=usage.used, total=usage.total, unit="blocks")
    status.pools.add(name="waiting", used=snapshot.waiting, total=max_waiting, unit="requests")
    for name, value in snapshot.counters._asdict().items():
        status.counters[name] = value


def add_saves(status: common_pb2.WorkerStatus, saves: SaveCounters, pool_bytes: int) -> None:
    """Objects in the pool that this rank is writing or has leased, against the memory it gives to the pool.

    Objects that nobody uses stay in the pool as a cache and count as nothing here.
    """
    status.pools.add(name="pool_bytes", used=saves.object_bytes, total=pool_bytes, unit="bytes")
    status.gauges["pool_objects"] = saves.objects
    status.counters["objects_saved"] = saves.objects_saved
    status.counters["bytes_saved"] = saves.bytes_saved
    status.counters["save_seconds"] = saves.save_seconds
    status.counters["unsaved_requests"] = saves.failed_requests


def add_transfers(
    status: common_pb2.WorkerStatus,
    gate: GateCounters,
    published: PublisherCounters,
    loads: LoadCounters,
    outstanding_reads: int,
) -> None:
    """What every TP rank counts for itself."""
    status.counters["gate_waits"] = gate.waits
    status.counters["gate_wait_seconds"] = gate.wait_seconds
    status.counters["gate_late"] = gate.late
    status.counters["generation_bumps"] = gate.bumps
    status.counters["batches"] = published.batches
    status.counters["acks"] = published.acks
    status.counters["late_acks"] = published.late_acks
    status.counters["duplicate_acks"] = published.duplicate_acks
    status.counters["unknown_acks"] = published.unknown_acks
    status.counters["fenced_batches"] = published.fenced
    status.counters["failed_batches"] = published.failed_batches
    status.counters["bytes_loaded"] = loads.bytes_loaded
    status.counters["load_seconds"] = loads.load_seconds
    status.counters["failed_loads"] = loads.failed_loads
    status.counters["wrong_checksums"] = loads.wrong_checksums
    status.gauges["outstanding_reads"] = outstanding_reads


def add_health(status: common_pb2.WorkerStatus, down: str, health: HealthCounters) -> None:
    """Whether the pool answers; while it does not, prefill goes on without it and `detail` says why."""
    status.gauges["pool_up"] = not down
    status.counters["pool_errors"] = health.errors
    status.counters["pool_outages"] = health.outages
    if down and not status.detail:
        status.detail = f"without the pool: {down}"


def add_pool_usage(status: common_pb2.WorkerStatus, usage: PoolUsage) -> None:
    """What the whole pool holds, over all groups: the cache of prefixes, and objects in use. Rank 0 only."""
    status.gauges["pool_cached_bytes"] = usage.used_bytes
    status.gauges["pool_cached_objects"] = usage.objects
    status.gauges["pool_total_bytes"] = usage.total_bytes
    status.counters["pool_evictions"] = usage.evictions
