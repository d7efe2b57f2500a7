"""From the file a user wrote to the file every process of one run reads: ports, folders and devices filled in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from deploy.checkpoint import check_weights, checkpoint_of
from deploy.device_root import DeviceRoot, default_parent, sweep_dead
from deploy.ports import LocalHost, PortChooser
from deploy.signals import Stopped
from engine.config import ConfigError, SluiceConfig
from engine.config_check import check_against_model
from engine.credentials import Credentials, check_called

_LONGEST_SOCKET_NAME = 48
"""Room for a socket's file name below run_dir: Unix socket paths are limited to 107 bytes."""

_KEPT = "kept"
"""File that marks a run folder which is not to be removed."""


@dataclass(frozen=True)
class Run:
    """One run of a deployment, or of one pod's part of it.

    `config` has no open field left; `config_file` is its copy for the processes. Their output goes to files in
    `log_dir`, or to our own output with `log_to_output`.
    """

    config: SluiceConfig
    config_file: Path
    run_dir: Path
    device_root: Path
    log_to_output: bool = False

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "logs"

    def keep(self) -> None:
        """The folder stays, temporary or not: a process died in it, and its logs say why."""
        (self.run_dir / _KEPT).touch()

    @property
    def kept(self) -> bool:
        return (self.run_dir / _KEPT).exists()

    @property
    def http_url(self) -> str:
        return f"{self.config.security.http_scheme}://{reachable(self.config.http.host)}:{self.config.http.port}"

    @property
    def grpc_url(self) -> str:
        """For people: `grpcs` means TLS."""
        return f"{self.config.security.grpc_scheme}://{self.grpc_address}"

    @property
    def grpc_host(self) -> str:
        return reachable(self.config.grpc.host)

    @property
    def grpc_address(self) -> str:
        return f"{self.grpc_host}:{self.config.grpc.port}"


def reachable(host: str) -> str:
    """An address by which this machine reaches a server that listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


def check(config: SluiceConfig, grpc: bool = True) -> None:
    """Checks the configuration against the checkpoint and, unless nothing here speaks gRPC, against the certificates
    and keys it names. Raises ConfigError."""
    if grpc:
        Credentials.of(config.security)
    check_against_model(config, checkpoint_of(config))


@contextlib.contextmanager
def resolved(config: SluiceConfig, pause: Callable[[float], None] = time.sleep) -> Iterator[Run]:
    """Creates the run's folders, fills in what is open, writes the file. Everything temporary is gone afterwards.

    A run folder named by `runtime.run_dir` stays (logs); one made here is removed unless the run ended in an error or
    was told to keep it.
    Whatever takes time calls `pause`. Raises ConfigError: does not fit the checkpoint, a port or folder is in use; and
    what `pause` raises.
    """
    check(config)
    check_weights(config)
    called = {"grpc.host": reachable(config.grpc.host), "runtime.host": config.runtime.host}
    check_called(config.security, called)
    parent = default_parent()
    sweep_dead(parent)
    with _run_dir(config) as run_dir, _device_root(config, parent) as device_root:
        yield written(filled(config, pause), run_dir, device_root)


def filled(config: SluiceConfig, pause: Callable[[float], None] = time.sleep) -> SluiceConfig:
    """`config` with free ports of this machine in place of open ones.

    Raises ConfigError: a port is in use, or a host is not this one; and what `pause` raises, which is called while a
    name is looked up.
    """
    ports = PortChooser()

    def port(section: str, field: str, host: LocalHost) -> dict[str, int]:
        wanted = int(getattr(getattr(config, section), field))
        return {field: ports.choose(f"{section}.{field}", host, wanted)}

    local = LocalHost.of("runtime.host", config.runtime.host, pause)
    pool_host = LocalHost.of("pool.host", config.pool.host, pause) if config.pool.host else local
    http = port("http", "port", LocalHost.of("http.host", config.http.host, pause))
    grpc = port("grpc", "port", LocalHost.of("grpc.host", config.grpc.host, pause))
    pool: dict[str, int] = {}
    for field in ("meta_port", "config_port", "metrics_port"):
        pool |= port("pool", field, pool_host)
    return config.model_copy(
        update={
            "transfer": config.transfer.model_copy(update=port("transfer", "store_port", local)),
            "pool": config.pool.model_copy(update=pool),
            "http": config.http.model_copy(update=http),
            "grpc": config.grpc.model_copy(update=grpc),
        }
    )


def written(config: SluiceConfig, run_dir: Path, device_root: Path) -> Run:
    """Enters the folders into `config` and writes it into `run_dir` for the processes."""
    full = config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"path": str(Path(config.model.path).resolve()), "name": config.model_name}
            ),
            "hostcann": config.hostcann.model_copy(
                update={"root": str(device_root), "devices": config.hostcann.devices or config.worker_count}
            ),
            "runtime": config.runtime.model_copy(update={"run_dir": str(run_dir)}),
        }
    )
    config_file = run_dir / "sluice.yaml"
    config_file.write_text(yaml.safe_dump(full.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    (run_dir / "logs").mkdir(exist_ok=True)
    for stale in (*run_dir.glob("*.rendezvous"), run_dir / _KEPT):  # of an earlier run in the same folder
        stale.unlink(missing_ok=True)
    return Run(full, config_file, run_dir, device_root)


@contextlib.contextmanager
def _run_dir(config: SluiceConfig) -> Iterator[Path]:
    if config.runtime.run_dir is None:
        temporary = Path(tempfile.mkdtemp(prefix="sluice-"))
        try:
            yield temporary
        except (ConfigError, Stopped):
            _remove(temporary)
            raise
        _remove(temporary)  # not reached after any other error: the logs stay
        return
    path = Path(config.runtime.run_dir).resolve()
    if len(os.fsencode(path)) + _LONGEST_SOCKET_NAME > 107:
        raise ConfigError(f"runtime.run_dir = {str(path)!r}: too long for the sockets in it; use at most 59 bytes")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"runtime.run_dir = {str(path)!r}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    except BlockingIOError:
        raise ConfigError(f"runtime.run_dir = {str(path)!r}: used by another running deployment") from None
    finally:
        os.close(lock)


def _remove(temporary: Path) -> None:
    if not (temporary / _KEPT).exists():
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _device_root(config: SluiceConfig, parent: Path) -> Iterator[Path]:
    path = Path(config.hostcann.root).resolve() if config.hostcann.root else parent / secrets.token_hex(4)
    try:
        root = DeviceRoot(path)
    except BlockingIOError:
        raise ConfigError(f"hostcann.root = {str(path)!r}: used by another running deployment") from None
    except OSError as error:
        raise ConfigError(f"hostcann.root = {str(path)!r}: {error.strerror}") from None
    try:
        yield path
    finally:
        root.close()
