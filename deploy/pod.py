"""One pod's part of a deployment: ``python -m deploy.pod ROLE --config sluice.yaml``.

1. take this pod's configuration from the common one (deploy/pod_plan.py) and write it for the processes;
2. start the role's processes: a service, or all ranks of one prefill or decode group;
3. the death of one ends the pod with status 1: starting it again is Kubernetes' business, and a group lives or dies
   as a whole;
4. on SIGTERM the leaders end first, after their requests (`runtime.drain_s`), then the other ranks.

``python -m deploy.probe`` asks the processes how they are.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from deploy import probe, processes
from deploy.child import ChildSpec
from deploy.device_root import default_parent
from deploy.pod_plan import Pod, Role, pod_config
from deploy.ports import LocalHost, PortChooser, can_connect
from deploy.resolve import Run, check, written
from deploy.signals import Signals, Stopped
from deploy.supervisor import ChildDied, StopPhase, Supervisor
from engine.config import ConfigError, SluiceConfig, load_config
from transfer import hostcann

DEFAULT_CONFIG = Path("/etc/sluice/sluice.yaml")
_POLL_S = 0.1
_END_S = 10.0  # a process's own end, see the processes' stop deadlines


def pod_processes(run: Run, pod: Pod) -> list[ChildSpec]:
    """What this pod runs, the leaders of a group before the other ranks.

    With a real driver a pod sees its own devices only, numbered from 0. Emulated ones are shared by the pods of a node
    and numbered through the deployment.
    """
    config, port = run.config, run.config.grpc.worker_port
    local = processes.has_driver()
    match pod.role:
        case Role.META_SERVER:
            return [processes.meta_server(run)]
        case Role.POOL_SERVICE:
            return [processes.pool_service(run)]
        case Role.PREFILL:
            device = 0 if local else config.prefill_device(pod.group, 0)
            return processes.prefill_group(run, pod.group, processes.Room(device, port))
        case Role.DECODE:
            device = 0 if local else config.decode_device(pod.group, 0, 0)
            return processes.decode_group(run, pod.group, processes.Room(device, port))


def stop_phases(config: SluiceConfig, specs: list[ChildSpec]) -> list[StopPhase]:
    """Leaders need the other ranks until they have ended their requests."""
    leaders = tuple(spec.name for spec in specs if spec.name.endswith("/tp0"))
    drain_s = config.runtime.drain_s
    first = (processes.META_SERVER, *leaders)
    rest = tuple(spec.name for spec in specs if spec.name not in first)
    return [
        StopPhase((processes.POOL_SERVICE,), 0.0),  # it only knows where objects are, and takes 4 s to end by itself
        StopPhase(first, drain_s + _END_S),
        StopPhase(rest, _END_S),
    ]


def health_targets(run: Run, specs: list[ChildSpec]) -> list[probe.Target]:
    """Where the pod's gRPC processes listen; MemCache's service has none."""
    config, security = run.config, run.config.security
    targets = []

    def add(port: int, service: str) -> None:
        address = f"{config.runtime.host}:{port}"
        targets.append(probe.Target(address, service, security.ca, security.server_name))

    for index, spec in enumerate(specs):
        if spec.name == processes.META_SERVER:
            add(config.grpc.port, "sluice.v1.SluiceService")
        elif spec.name != processes.POOL_SERVICE:
            add(config.grpc.worker_port + index, "sluice.v1.WorkerService")
    return targets


def serve(config: SluiceConfig, pod: Pod) -> int:
    """Until SIGTERM, then 0; 1 when one of the processes has died. Raises ConfigError before anything starts."""
    signals, supervisor = Signals(), Supervisor()
    with pod_run(config, pod) as run:
        specs = pod_processes(run, pod)
        probe.write_targets(run.run_dir, health_targets(run, specs))
        try:
            if pod.role is Role.PREFILL:
                _await_pool(run.config, signals)
            supervisor.start(specs)
            while True:
                signals.sleep(_POLL_S)
                supervisor.check()
        except ChildDied as death:
            print(f"sluice: {death}", file=sys.stderr)
            return 1
        except Stopped:
            return 0
        finally:
            if killed := supervisor.stop(stop_phases(run.config, specs)):
                print(f"sluice: had to kill: {', '.join(killed)}", file=sys.stderr)


def _await_pool(config: SluiceConfig, signals: Signals) -> None:
    """Pods start in any order, but a prefill worker joins the pool when it starts. Raises ConfigError, Stopped."""
    deadline = time.monotonic() + config.runtime.startup_timeout_s
    while not can_connect(config.pool_host, config.pool.config_port):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"pool.host = {config.pool_host}, pool.config_port = {config.pool.config_port}: MemCache's MetaService "
                f"did not come within runtime.startup_timeout_s = {config.runtime.startup_timeout_s:g}"
            )
        signals.sleep(_POLL_S)


@contextlib.contextmanager
def pod_run(config: SluiceConfig, pod: Pod) -> Iterator[Run]:
    """This pod's folders and its resolved sluice.yaml. Raises ConfigError."""
    run_dir = Path(config.runtime.run_dir or "/run/sluice")
    check(config, grpc=pod.role is not Role.POOL_SERVICE)
    mine = _with_store_port(pod_config(config, pod, str(run_dir)))
    with _device_root(config) as device_root:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            run = written(mine, run_dir, device_root)
        except OSError as error:
            raise ConfigError(f"runtime.run_dir = {str(run_dir)!r}: {error.strerror}") from None
        yield replace(run, log_to_output=True)


def _with_store_port(config: SluiceConfig) -> SluiceConfig:
    host = LocalHost.of("runtime.host", config.runtime.host)
    port = PortChooser().choose("transfer.store_port", host, config.transfer.store_port)
    return config.model_copy(update={"transfer": config.transfer.model_copy(update={"store_port": port})})


@contextlib.contextmanager
def _device_root(config: SluiceConfig) -> Iterator[Path]:
    """The emulated driver's folder, which the pods of a node share; what dead pods left in it goes first and last."""
    if processes.has_driver():
        yield Path()
        return
    if config.hostcann.root is None:
        raise ConfigError("hostcann.root is absent: without a driver, the pods of a node share a folder; name it")
    root = Path(config.hostcann.root)
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        hostcann.sweep(root)
        root.mkdir(parents=True, exist_ok=True, mode=0o700)  # sweep takes an empty folder away
    except OSError as error:
        raise ConfigError(f"hostcann.root = {str(root)!r}: {error.strerror}") from None
    try:
        yield root
    finally:
        hostcann.sweep(root)
        if root.parent == default_parent():
            with contextlib.suppress(OSError):
                root.parent.rmdir()  # works only when it is empty


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 after a clean stop, 1 when a process has died, 2 for a configuration that cannot be used."""
    parser = argparse.ArgumentParser(prog="deploy.pod", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("role", help=f"one of {', '.join(Role)}")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="the deployment's common sluice.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a field")
    options = parser.parse_args(arguments)
    try:
        return serve(load_config(options.config, options.set), Pod.of(options.role, os.environ))
    except ConfigError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
