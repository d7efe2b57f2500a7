"""Prometheus metrics of the meta server and, read at scrape time, of every worker."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sluice.v1 import common_pb2

from meta_server.errors import Failure, FailureKind
from meta_server.registry import Registry
from meta_server.request import Final

_REFUSED = {FailureKind.INVALID, FailureKind.UNKNOWN_MODEL, FailureKind.BUSY}
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counts what happens to requests. Every request ends in exactly one of finished, aborted, failed, refused."""

    def __init__(self, registry: Registry) -> None:
        self.prometheus = CollectorRegistry()
        self._requests = Counter("sluice_requests", "Ended requests", ["outcome"], registry=self.prometheus)
        self._tokens = Counter(
            "sluice_tokens", "Tokens of requests that did not fail", ["kind"], registry=self.prometheus
        )
        self._ttft = Histogram(
            "sluice_ttft_seconds", "Admission to first token", buckets=_TTFT_BUCKETS, registry=self.prometheus
        )
        self._tpot = Histogram(
            "sluice_time_per_token_seconds",
            "Mean time of the tokens after the first, per request",
            buckets=_TOKEN_BUCKETS,
            registry=self.prometheus,
        )
        self._reruns = Counter(
            "sluice_reruns",
            "Runs of requests that were interrupted and gone on with",
            ["cause"],
            registry=self.prometheus,
        )
        self.in_flight = Gauge("sluice_requests_in_flight", "Running requests", registry=self.prometheus)
        self.prometheus.register(_WorkerCollector(registry))
        self._totals: dict[str, float] = {
            "requests_finished": 0,
            "requests_aborted": 0,
            "requests_failed": 0,
            "requests_refused": 0,
            "reruns_lost": 0,
            "reruns_preempted": 0,
            "prompt_tokens": 0,
            "completion_tokens": 0,
        }

    def totals(self) -> dict[str, float]:
        """The counters of GetStatus."""
        return dict(self._totals)

    def refused(self) -> None:
        """A request did not pass validation."""
        self._count("refused")

    def rerun(self, cause: str) -> None:
        """A run was interrupted, "lost" with a worker or "preempted" by decode, and its request goes on."""
        self._reruns.labels(cause).inc()
        self._totals[f"reruns_{cause}"] += 1

    def ended(self, final: Final) -> None:
        """A request that had passed validation ended with `final`."""
        if isinstance(final, Failure):
            self._count("refused" if final.kind in _REFUSED else "failed")
            return
        self._count("aborted" if final.reason == common_pb2.FINISH_REASON_ABORTED else "finished")
        usage = final.usage
        for kind, tokens in (("prompt", usage.prompt_tokens), ("completion", usage.completion_tokens)):
            self._tokens.labels(kind).inc(tokens)
            self._totals[f"{kind}_tokens"] += tokens
        if usage.completion_tokens > 0:
            self._ttft.observe(usage.ttft_seconds)
        if usage.completion_tokens > 1:
            self._tpot.observe(usage.decode_seconds / (usage.completion_tokens - 1))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.prometheus)

    def _count(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()
        self._totals[f"requests_{outcome}"] += 1


class _WorkerCollector(Collector):
    """Shows the last heartbeat of every worker."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        states = self._registry.states()
        up = GaugeMetricFamily("sluice_worker_ready", "1 when the worker is ready", labels=["worker"])
        used = GaugeMetricFamily("sluice_pool_used", "Used units of a pool", labels=["worker", "pool", "unit"])
        total = GaugeMetricFamily("sluice_pool_total", "All units of a pool", labels=["worker", "pool", "unit"])
        counter = CounterMetricFamily("sluice_worker", "Counters of a worker", labels=["worker", "name"])
        gauge = GaugeMetricFamily("sluice_worker_value", "Momentary values of a worker", labels=["worker", "name"])
        for state in states:
            worker = state.info.worker_id
            up.add_metric([worker], float(state.health == "ready"))
            for pool in state.status.pools:
                used.add_metric([worker, pool.name, pool.unit], pool.used)
                total.add_metric([worker, pool.name, pool.unit], pool.total)
            for name, value in sorted(state.status.counters.items()):
                counter.add_metric([worker, name], value)
            for name, value in sorted(state.status.gauges.items()):
                gauge.add_metric([worker, name], value)
        yield from (up, used, total, counter, gauge)
