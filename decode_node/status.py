"""What a decode worker says of itself in heartbeats and status calls."""

from __future__ import annotations

import dataclasses

from sluice.v1 import common_pb2

from decode_node.backend import HotCounters
from decode_node.geometry import DecodeGeometry
from decode_node.kv_room import HOT_ROWS, INDEXER, MAIN
from decode_node.leader import Snapshot
from decode_node.pull_counters import PullCounters
from decode_node.rank import StepCounters

_POOLS = {MAIN: ("host_blocks", "blocks"), INDEXER: ("indexer_blocks", "blocks"), HOT_ROWS: ("hot_rows", "rows")}


def add_scheduling(status: common_pb2.WorkerStatus, snapshot: Snapshot) -> None:
    """Requests, pools and contexts; rank 0 only, which schedules for its DP rank."""
    status.running, status.waiting = snapshot.running, snapshot.waiting
    for cache, (name, unit) in _POOLS.items():
        used, total = snapshot.usage[cache]
        status.pools.add(name=name, used=used, total=total, unit=unit)
    status.counters["preemptions"] = snapshot.preemptions
    status.gauges["context_tokens"] = sum(snapshot.context_tokens)
    status.gauges["longest_context_tokens"] = max(snapshot.context_tokens, default=0)


def add_rank(status: common_pb2.WorkerStatus, geometry: DecodeGeometry, steps: StepCounters, hot: HotCounters) -> None:
    """What every TP rank counts for itself; hits and misses are summed over layers and steps."""
    status.counters["steps"] = steps.steps
    status.counters["tokens"] = steps.tokens
    status.counters["draft_tokens"] = steps.draft_tokens
    status.counters["accepted_tokens"] = steps.accepted_tokens
    if steps.draft_tokens:
        status.gauges["acceptance_rate"] = steps.accepted_tokens / steps.draft_tokens
    status.counters["step_seconds"] = steps.step_seconds
    status.counters["hot_hits"] = hot.hits
    status.counters["hot_misses"] = hot.misses
    status.counters["bytes_host_to_device"] = hot.bytes_host_to_device
    status.gauges["indexer_bytes"] = geometry.indexer_bytes
    status.gauges["host_pool_bytes"] = geometry.host_pool_bytes
    status.gauges["hot_tokens"] = geometry.hot.tokens
    status.gauges["max_request_tokens"] = geometry.max_request_tokens


def add_pulls(status: common_pb2.WorkerStatus, pulls: PullCounters, pending: int, most: int) -> None:
    """The puller's counters, and the requests it still holds: at most `most`, zero when nothing is in flight."""
    status.pools.add(name="pulls", used=pending, total=most, unit="requests")
    for name, value in dataclasses.asdict(pulls).items():
        status.counters[name if name == "bytes_pulled" else f"pull_{name}"] = value
