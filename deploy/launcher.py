"""``sluice up``: starts every process of one deployment in the foreground and ends them all.

1. resolve the configuration (deploy/resolve.py) and sweep what dead deployments left in shared memory;
2. start MemCache's MetaService and the meta server, wait until they listen;
3. start the workers, show their progress, wait until the meta server reports all of them ready;
4. print ``sluice ready`` and watch (deploy/watch.py): with ``runtime.restart`` who dies is started again;
5. on SIGTERM, SIGHUP or Ctrl-C end everything: meta server, workers, MetaService, each with a deadline, 15 s in all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console

from deploy import processes
from deploy.client import Client, ClientError
from deploy.ports import can_connect
from deploy.progress import Progress
from deploy.resolve import Run, resolved
from deploy.signals import Signals, Stopped
from deploy.supervisor import ChildDied, StopPhase, Supervisor
from deploy.watch import DeploymentLost, Watch
from engine.config import SluiceConfig

_POLL_S = 0.1
_STOP_PHASES = (
    StopPhase((processes.META_SERVER,), 3.5),
    StopPhase(("prefill-", "decode-"), 9.5),
    StopPhase((processes.POOL_SERVICE,), 0.0),  # it only knows where objects are, and takes 4 s to end by itself
)
"""Who is asked to stop when, and how long it may take. Their sum leaves time to kill the rest within 15 s."""


class DeploymentFailed(Exception):
    """The deployment did not become ready, or cannot go on; the text says which process failed and why."""


def up(config: SluiceConfig, console: Console) -> None:
    """Runs the deployment until a signal ends it.

    Raises ConfigError before anything starts; DeploymentFailed when it did not get ready or lost its meta server.
    """
    signals = Signals()
    with suppress(Stopped), started(config, console, signals) as (run, supervisor):
        console.print(f"sluice ready {run.http_url} {run.grpc_url}", markup=False, highlight=False, soft_wrap=True)
        watch = Watch(
            run,
            processes.everything(run),
            supervisor,
            lambda text: console.print(text, markup=False, soft_wrap=True),
        )
        try:
            while True:
                signals.sleep(_POLL_S)
                watch.look()
        except DeploymentLost as loss:
            raise DeploymentFailed(str(loss)) from None


@contextmanager
def started(config: SluiceConfig, console: Console, signals: Signals) -> Iterator[tuple[Run, Supervisor]]:
    """A deployment that is ready; it ends with the block. Raises what `up` raises, and Stopped."""
    with resolved(config, signals.sleep) as run, _supervised(console, run) as supervisor:
        console.print(f"run folder {run.run_dir}", markup=False, soft_wrap=True)
        try:
            _start(run, supervisor, signals, console)
        except ChildDied as death:
            run.keep()
            raise DeploymentFailed(f"the deployment did not start\n{death}") from None
        yield run, supervisor


@contextmanager
def _supervised(console: Console, run: Run) -> Iterator[Supervisor]:
    supervisor = Supervisor()

    def say(text: str) -> None:
        with suppress(OSError):  # the terminal may have gone
            console.print(text, markup=False, soft_wrap=True)

    try:
        yield supervisor
    finally:
        say("stopping")
        try:
            killed = supervisor.stop(_STOP_PHASES)
        except KeyboardInterrupt:
            killed = supervisor.kill()
        if killed:
            say(f"had to kill: {', '.join(killed)}")
        say("stopped")
        if run.kept:
            say(f"a process had died; the logs stay in {run.log_dir}")


def _start(run: Run, supervisor: Supervisor, signals: Signals, console: Console) -> None:
    deadline = time.monotonic() + run.config.runtime.startup_timeout_s
    with Progress(console) as progress:
        listening = {
            processes.POOL_SERVICE: (run.config.pool_host, run.config.pool.config_port),
            processes.META_SERVER: (run.grpc_host, run.config.grpc.port),
        }
        supervisor.start(processes.servers(run))
        for name, (host, port) in listening.items():
            progress.update(name, "starting")
            while not can_connect(host, port):
                _step(run, supervisor, signals, deadline, progress)
            progress.update(name, "ready")
        specs = processes.workers(run)
        supervisor.start(specs)
        for spec in specs:
            progress.update(spec.name, "starting")
        with Client.of(run.config, run.grpc_address) as client:
            while not _all_ready(client, len(specs), progress):
                _step(run, supervisor, signals, deadline, progress)


def _step(run: Run, supervisor: Supervisor, signals: Signals, deadline: float, progress: Progress) -> None:
    signals.sleep(_POLL_S)
    supervisor.check()
    if time.monotonic() > deadline:
        waiting = "".join(f"\n{name}: {state}{_warning(supervisor, name)}" for name, state in progress.waiting())
        raise DeploymentFailed(f"not ready within runtime.startup_timeout_s; logs in {run.log_dir}{waiting}")


def _warning(supervisor: Supervisor, name: str) -> str:
    warning = supervisor.last_warning(name)
    return "" if warning is None else f"\n  | {warning}"


def _all_ready(client: Client, expected: int, progress: Progress) -> bool:
    try:
        status = client.status(timeout_s=5.0)
    except ClientError:
        return False
    ready = 0
    for worker in status.workers:
        state = worker.status.detail or worker.health if worker.health != "ready" else "ready"
        progress.update(worker.info.worker_id, state)
        ready += worker.health == "ready"
    return status.ready and ready == expected
