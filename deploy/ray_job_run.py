"""One deployment on a Ray cluster, from its placement to its end; deploy/ray_job.py tells the story."""

from __future__ import annotations

import os
import time

import ray
import ray.util
from rich.console import Console

from deploy import processes
from deploy.client import Client, ClientError
from deploy.launcher import DeploymentFailed
from deploy.part import Part
from deploy.ports import can_connect
from deploy.progress import Progress
from deploy.ray_job_placement import Placement
from deploy.ray_job_watch import Units
from deploy.signals import Signals
from deploy.spread import ClusterPlan
from deploy.supervisor import StopPhase
from deploy.units import units
from deploy.watch import DeploymentLost

_POLL_S = 0.2
_STATUS_PERIOD_S = 1.0
_EXPLAIN_S = 5.0
_STOP_WAIT_S = 3.0  # Ray's default of RAY_JOB_STOP_WAIT_TIME_S
_STOP_MARGIN_S = 1.2  # of that, for what is not the processes' own end
_SERVERS_END_S = 3.5
_SWEEP_S = 0.5


class RayJob:
    """The job's driver: holds the servers itself, since it runs on the head, and the units through their actors.

    However it ends, nothing stays behind: its children end with it, Ray ends its actors, and theirs end with them
    (test_stopping_the_job_leaves_nothing).
    """

    def __init__(self, plan: ClusterPlan, console: Console, signals: Signals) -> None:
        self._plan, self._console, self._signals = plan, console, signals
        self._deadline = time.monotonic() + plan.config.runtime.startup_timeout_s

    def run(self) -> None:
        """Until a signal ends it. Raises DeploymentFailed, ConfigError, Stopped."""
        config = self._plan.config
        parts = units(config)
        with Placement(parts, config.ray.strategy) as placement, Progress(self._console) as progress:
            self._await_room(placement)
            servers = Part(self._plan.for_servers, "servers", processes.servers)
            placed = Units(parts, placement, self._plan.for_units, self._say)
            try:
                self._await_servers(servers, progress)
                with Client.of(config, self._plan.grpc_address) as client:
                    self._serve(servers, placed, client, progress)
            finally:
                self._end(servers, placed)

    def _await_room(self, placement: Placement) -> None:
        explain_at = time.monotonic() + _EXPLAIN_S
        while not placement.complete():
            self._signals.sleep(_POLL_S)
            if time.monotonic() > self._deadline:
                raise DeploymentFailed(f"no room within runtime.startup_timeout_s: {placement.explain()}")
            if time.monotonic() > explain_at:
                explain_at = float("inf")
                self._say(f"waiting for room: {placement.explain()}")

    def _await_servers(self, servers: Part, progress: Progress) -> None:
        for name, (host, port) in self._plan.listening.items():
            progress.update(name, "starting")
            while not can_connect(host, port):
                self._signals.sleep(_POLL_S)
                self._refuse(servers.look(), progress)
            progress.update(name, "ready")

    def _serve(self, servers: Part, placed: Units, client: Client, progress: Progress) -> None:
        expected, told, next_status = self._plan.config.worker_count, False, 0.0
        while True:
            self._signals.sleep(_POLL_S)
            placed.look()
            try:
                events = servers.look()
            except DeploymentLost as loss:
                raise DeploymentFailed(str(loss)) from None
            if not told:
                self._refuse(events + placed.trouble(), progress)
            for event in events:
                self._say(event)
            if time.monotonic() >= next_status:
                next_status = time.monotonic() + _STATUS_PERIOD_S
                if self._ready(client, progress) == expected and not told:
                    told = True
                    self._say(f"sluice ready {self._plan.http_url} {self._plan.grpc_url}")

    def _refuse(self, trouble: list[str], progress: Progress) -> None:
        """Before it was ready once, a deployment that loses a process is not set up as it should be."""
        if trouble:
            raise DeploymentFailed("\n".join(["the deployment did not start", *trouble]))
        if time.monotonic() > self._deadline:
            raise DeploymentFailed(f"not ready within runtime.startup_timeout_s; {progress.waiting_for()}")

    def _ready(self, client: Client, progress: Progress) -> int:
        """How many workers are ready. Shows what has changed of each."""
        try:
            status = client.status(timeout_s=5.0)
        except ClientError:
            return 0
        for worker in status.workers:
            starting = worker.health == "starting" and worker.status.detail
            progress.update(worker.info.worker_id, worker.status.detail if starting else worker.health)
        return sum(worker.health == "ready" for worker in status.workers)

    def _end(self, servers: Part, placed: Units) -> None:
        """Ray kills this process RAY_JOB_STOP_WAIT_TIME_S after its signal; so much is shared out here.

        Workers are asked to end together with the servers, or after them if these are to end their requests first.
        """
        self._say("stopping")
        wait_s = float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", _STOP_WAIT_S))
        deadline = time.monotonic() + max(1.0, wait_s - _STOP_MARGIN_S)
        drain_s = self._plan.config.runtime.drain_s
        calls = [] if drain_s else placed.ask_to_stop(_left(deadline))
        servers_s = min(drain_s + _SERVERS_END_S, _left(deadline))
        servers.stop([StopPhase((processes.META_SERVER,), servers_s), StopPhase((processes.POOL_SERVICE,), 0.0)])
        calls = calls or placed.ask_to_stop(_left(deadline))
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=_left(deadline) + _SWEEP_S)
        placed.end()
        self._say("stopped")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
