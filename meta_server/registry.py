"""Which worker processes exist, and which of them form groups that can serve."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sluice.v1 import client_pb2, common_pb2, registry_pb2

from meta_server.compatibility import check_fits, check_info

PREFILL = common_pb2.WORKER_ROLE_PREFILL
DECODE = common_pb2.WORKER_ROLE_DECODE
MEMCACHE_SHARE = "pool_bytes"  # a prefill leader's name for what it holds of the MemCache pool


@dataclass(frozen=True, order=True)
class ReplicaKey:
    """A set of TP ranks that serves requests as one: a prefill group, or one DP rank of a decode group."""

    role: int
    group: str
    dp_rank: int

    @classmethod
    def of(cls, info: registry_pb2.WorkerInfo) -> ReplicaKey:
        return cls(info.role, info.group, info.dp_rank if info.role == DECODE else 0)


@dataclass
class Worker:
    """One process as the registry knows it. `heard` is a monotonic time in seconds.

    `suspect`: the connection to it broke, so nothing new is sent to it until it is heard of again.
    """

    info: registry_pb2.WorkerInfo
    heard: float
    status: common_pb2.WorkerStatus = field(default_factory=common_pb2.WorkerStatus)
    lost: bool = False
    suspect: bool = False

    @property
    def health(self) -> str:
        """As in `WorkerState.health`."""
        if self.lost or self.suspect:
            return "lost"
        return "ready" if self.status.ready else "starting"


@dataclass(frozen=True)
class Replica:
    """A complete set of TP ranks, all ready, in rank order; rank 0 serves the requests."""

    key: ReplicaKey
    workers: tuple[Worker, ...]

    @property
    def leader(self) -> Worker:
        return self.workers[0]

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt + output every rank can hold, in tokens."""
        return min(worker.info.max_request_tokens for worker in self.workers)


class Registry:
    """Everything known of the workers, learned only from their own calls (so a new meta server can start empty).

    Invariants:
        * A replica is offered only when every TP rank of it is registered, ready, not lost and not suspect
          (test_replica_complete_only_with_all_ranks_ready).
        * Two live workers never disagree on the KV layout or on TP sizes (test_incompatible_layout_is_refused).
        * A watcher of a replica is told exactly once that it was lost (test_watcher_is_told_once).
    """

    def __init__(self, lost_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._ready_at: float | None = None
        self._watchers: dict[ReplicaKey, set[Callable[[str], None]]] = defaultdict(set)

    def register(self, info: registry_pb2.WorkerInfo) -> None:
        """Adds a worker, or replaces the same worker's earlier process. Registering twice changes nothing.

        Raises:
            RegistrationRefused: a field is missing, or the worker does not fit the live ones.
        """
        check_info(info)
        others = [worker.info for worker in self._live() if worker.info.worker_id != info.worker_id]
        check_fits(info, others)
        known = self._workers.get(info.worker_id)
        if known is not None and known.info.epoch != info.epoch:
            self._lose(known, "it was replaced by a new process")
        if known is not None and known.info.epoch == info.epoch and not known.lost:
            known.info.CopyFrom(info)
            known.heard = self._clock()
            return
        self._workers[info.worker_id] = Worker(info, self._clock())

    def heartbeat(self, worker_id: str, epoch: str, status: common_pb2.WorkerStatus) -> bool:
        """Takes a worker's status; False when it has to register (again) first."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.lost or worker.info.epoch != epoch:
            return False
        self._note_ready()
        worker.heard = self._clock()
        worker.suspect = False
        worker.status = status
        return True

    def leave(self, worker_id: str, epoch: str) -> None:
        """Forgets a worker that ends by itself; an older or unknown epoch is ignored."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.info.epoch == epoch:
            self._lose(worker, "it left the deployment")
            del self._workers[worker_id]

    def sweep(self) -> list[str]:
        """Marks workers that were silent too long as lost; returns their ids."""
        self._note_ready()
        deadline = self._clock() - self._lost_after_s
        silent = [worker for worker in self._live() if worker.heard < deadline]
        for worker in silent:
            self._lose(worker, f"it was silent for more than {self._lost_after_s:g} s")
        return [worker.info.worker_id for worker in silent]

    def replicas(self, role: int) -> list[Replica]:
        """The complete replicas of one role, in a stable order."""
        ranks: dict[ReplicaKey, list[Worker]] = defaultdict(list)
        for worker in self._workers.values():
            if worker.info.role == role and worker.health == "ready":
                ranks[ReplicaKey.of(worker.info)].append(worker)
        complete = []
        for key in sorted(ranks):
            workers = sorted(ranks[key], key=lambda worker: worker.info.tp_rank)
            if len(workers) == workers[0].info.tp_size:
                complete.append(Replica(key, tuple(workers)))
        return complete

    @property
    def ready(self) -> bool:
        """Whether a request can be served: a complete prefill and a complete decode replica exist."""
        return bool(self.replicas(PREFILL)) and bool(self.replicas(DECODE))

    def ready_within(self, seconds: float) -> bool:
        """Whether a request can be served, or could be less than `seconds` ago."""
        self._note_ready()
        return self._ready_at is not None and self._clock() - self._ready_at <= seconds

    def _note_ready(self) -> None:
        """To be called before anything makes a replica incomplete."""
        if self.ready:
            self._ready_at = self._clock()

    def missing(self) -> str:
        """For error texts: which roles have no complete replica."""
        roles = [name for role, name in ((PREFILL, "prefill"), (DECODE, "decode")) if not self.replicas(role)]
        return " and ".join(roles)

    def watch(self, replica: Replica, on_lost: Callable[[str], None]) -> Callable[[], None]:
        """Calls `on_lost(text)` when any rank of `replica` is lost; the text names the rank and the cause.

        Returns the function that ends the watch.
        """
        self._watchers[replica.key].add(on_lost)

        def unwatch() -> None:
            watchers = self._watchers.get(replica.key, set())
            watchers.discard(on_lost)
            if not watchers:
                self._watchers.pop(replica.key, None)

        return unwatch

    def live(self) -> set[tuple[str, str]]:
        """(worker id, epoch) of every process that is not lost."""
        return {(worker.info.worker_id, worker.info.epoch) for worker in self._live()}

    def pools(self) -> list[common_pb2.PoolUsage]:
        """Pools of the deployment as a whole: the MemCache pool, of which every prefill group tells its share."""
        shares = [pool for worker in self._live() for pool in worker.status.pools if pool.name == MEMCACHE_SHARE]
        if not shares:
            return []
        used, total = sum(share.used for share in shares), sum(share.total for share in shares)
        return [common_pb2.PoolUsage(name="memcache", used=used, total=total, unit="bytes")]

    def states(self) -> list[client_pb2.WorkerState]:
        """Every known worker, lost ones included, ordered by id."""
        now = self._clock()
        return [
            client_pb2.WorkerState(
                info=worker.info,
                status=worker.status,
                health=worker.health,
                heartbeat_age_seconds=max(0.0, now - worker.heard),
            )
            for _, worker in sorted(self._workers.items())
        ]

    def _live(self) -> Iterator[Worker]:
        return (worker for worker in list(self._workers.values()) if not worker.lost)

    def _lose(self, worker: Worker, cause: str) -> None:
        if worker.lost:
            return
        self._note_ready()
        worker.lost = True
        for on_lost in self._watchers.pop(ReplicaKey.of(worker.info), set()):
            on_lost(f"{worker.info.worker_id} was lost: {cause}")
