"""One seed of chaos over a real local deployment."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deploy.client import ClientError
from tests.chaos.disturb import Disturber, name_of
from tests.chaos.faults import injected_faults
from tests.chaos.load import REQUEST_TIMEOUT_S, Clients, ask_all
from tests.chaos.memory import MemoryWatch
from tests.chaos.questions import Question
from tests.chaos.record import Record
from tests.checkpoints import PASSKEY_GLM
from tests.cluster import Cluster
from transfer import hostcann

LEASE_S = 5.0
FIELDS: dict[str, object] = {
    "model.max_model_len": 2048,
    "prefill.groups": 2,
    "prefill.tp": 2,
    "prefill.max_tokens_per_step": 256,
    "decode.groups": 2,
    "decode.tp": 1,
    "decode.host_pool_bytes": "32MiB",
    "decode.reservation_s": 20,
    "pool.dram_bytes": "32MiB",
    "pool.timeout_s": 5,
    "pool.checksum": "on",
    "hostcann.hbm_bytes": "128MiB",
    "transfer.lease_s": LEASE_S,
    "transfer.read_timeout_s": 2,
    "transfer.handshake_timeout_s": 5,
    "runtime.heartbeat_s": 0.5,
    "runtime.lost_after_s": 4,
    "runtime.restart": "true",
    "runtime.restarts_per_minute": 30,
    "runtime.collective_timeout_s": 20,
    "runtime.max_reruns": 5,
    "runtime.rerun_wait_s": 30,
    "runtime.request_timeout_s": REQUEST_TIMEOUT_S,
}
"""Short leases and timeouts: what is lost shall be noticed within seconds."""

CLIENTS = 6
_TRIES = 3
_ALL_READY_S = 120.0
_WORKERS = 6


@dataclass
class Outcome:
    """What a run comes to; `failed` if anything happened that must not."""

    seed: int
    seconds: float
    record: Record
    memory: dict[str, tuple[float, float]] = field(default_factory=dict)  # see MemoryWatch.judge
    faults: dict[str, Counter[str]] = field(default_factory=dict)  # see injected_faults
    restarts: int = 0
    pools_zero: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.record.violations)


def run(seed: int, seconds: float, questions: list[Question], faults: dict[str, object], log: Path) -> Outcome:
    """Disturbs a deployment under load for so long, then looks whether it is whole again.

    Events go to the file `log`, the processes' logs to a folder beside it.
    """
    record = Record(log)
    outcome = Outcome(seed, seconds, record)
    fields = FIELDS | ({"faults.seed": seed, **faults} if faults else {})
    record.tell(f"seed {seed}, {seconds:g} s, knobs: {', '.join(f'{key}={value}' for key, value in fields.items())}")
    try:
        with Cluster(PASSKEY_GLM, fields, may_hang=True) as cluster:
            try:
                _disturb(cluster, outcome, questions)
                record.tell("calm")
                _recover(cluster, questions, record)
                outcome.pools_zero = True
                record.tell("stop")
            finally:
                _keep_logs(cluster, outcome, log.with_suffix(".logs"))
    except AssertionError as error:
        record.violation(str(error))
    return outcome


def _keep_logs(cluster: Cluster, outcome: Outcome, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(cluster.logs, folder)
    (folder / "sluice-up.txt").write_text("\n".join(cluster.output), encoding="utf-8")
    outcome.restarts = sum(line.startswith("starting ") and line.endswith(" again") for line in cluster.output)
    outcome.faults = injected_faults(folder)
    for process, counts in outcome.faults.items():
        struck = ", ".join(f"{knob} {count}" for knob, count in sorted(counts.items()))
        outcome.record.tell(f"faults injected by {process}: {struck}")


def _disturb(cluster: Cluster, outcome: Outcome, questions: list[Question]) -> None:
    def processes() -> list[psutil.Process]:
        return [process for process in cluster.children() if name_of(process)]

    memory = MemoryWatch(processes)
    clients = Clients(cluster.http_url, questions, outcome.record, outcome.seed, CLIENTS)
    disturber = Disturber(processes, outcome.record, outcome.seed)
    time.sleep(outcome.seconds)
    disturber.stop()
    clients.stop()
    memory.stop()
    outcome.memory = memory.judge(outcome.record)


def _recover(cluster: Cluster, questions: list[Question], record: Record) -> None:
    """Everybody comes back, every pool empties, no gate is stuck, every question is answered."""

    def all_ready() -> bool:
        try:
            workers = cluster.status().workers
        except ClientError:
            return False
        return sum(worker.health == "ready" for worker in workers) == _WORKERS

    cluster.wait_for(all_ready, _ALL_READY_S, lambda: f"not everybody came back: {_healths(cluster)}")
    record.tell("everybody is back")
    cluster.wait_idle(60.0)
    ask_all(cluster.http_url, questions, record, _TRIES, lambda: time.sleep(2.0))
    cluster.wait_idle(60.0)
    pool = [path.stat().st_blocks * 512 for path in (cluster.root / "pool").iterdir()]
    record.tell(f"{len(pool)} files of {sum(pool) >> 20} MiB below {cluster.root / 'pool'}")
    if freed := hostcann.sweep(cluster.root, keep=True):
        record.violation(f"{freed} bytes of dead workers lie around")
    cluster.wait_for(  # the end of the lease, where an answer was lost
        lambda: not _awaited(cluster), LEASE_S + 10.0, lambda: f"readers are waited for in vain by {_awaited(cluster)}"
    )


def _awaited(cluster: Cluster) -> list[str]:
    """Prefill ranks with batches that nobody has answered."""
    return [each.info.worker_id for each in cluster.status().workers if each.status.gauges["outstanding_reads"]]


def _healths(cluster: Cluster) -> dict[str, str]:
    return {worker.info.worker_id: worker.health for worker in cluster.status().workers}
