"""What one pod runs of a deployment that is spread over pods: its part of the configuration, from the common one.

Every pod reads the same ``sluice.yaml``, in which addresses are names of Services. Only the addresses by which a pod
itself is reached differ, and those are its own.
"""

from __future__ import annotations

import enum
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.config import ConfigError, SluiceConfig

ANY = "0.0.0.0"


class Role(enum.StrEnum):
    """What a pod can be. Prefill and decode pods hold one group each: the pod's ordinal is the group's number."""

    META_SERVER = "meta-server"
    POOL_SERVICE = "memcache-meta"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Pod:
    """This pod: its role, the number of its group (0 for a service), and its address."""

    role: Role
    group: int
    ip: str

    @classmethod
    def of(cls, role: str, environment: Mapping[str, str]) -> Pod:
        """From a role's name and the variables POD_NAME and POD_IP. Raises ConfigError naming what is wrong."""
        try:
            chosen = Role(role)
        except ValueError:
            raise ConfigError(f"role {role!r}: legal: {', '.join(Role)}") from None
        ip = environment.get("POD_IP", "")
        if not ip:
            raise ConfigError("POD_IP is not set: give it by the downward API (fieldRef status.podIP)")
        if chosen in (Role.META_SERVER, Role.POOL_SERVICE):
            return cls(chosen, 0, ip)
        name = environment.get("POD_NAME", "")
        ordinal = re.search(r"-(\d+)$", name)
        if ordinal is None:
            raise ConfigError(f"POD_NAME = {name!r}: must end with the group's number, as pods of a StatefulSet do")
        return cls(chosen, int(ordinal[1]), ip)


def pod_config(
    config: SluiceConfig, pod: Pod, run_dir: str, resolve: Callable[[str], str] = socket.gethostbyname
) -> SluiceConfig:
    """The configuration as this pod's processes need it.

    `resolve` turns a Service's name into its address: MemCache's client takes only addresses, and that of a Service
    stays the same while the pods behind it are replaced. Raises ConfigError: a port is open, the group is not one of
    the deployment's, a name is unknown.
    """
    _check_ports(config)
    _check_group(config, pod)
    listens = pod.role is Role.META_SERVER
    try:
        pool_host = pod.ip if pod.role is Role.POOL_SERVICE else resolve(config.pool_host)
    except OSError as error:
        raise ConfigError(f"pool.host = {config.pool_host!r}: {error}") from None
    return config.model_copy(
        update={
            "grpc": config.grpc.model_copy(update={"host": ANY} if listens else {}),
            "http": config.http.model_copy(update={"host": ANY} if listens else {}),
            "pool": config.pool.model_copy(update={"host": pool_host}),
            "runtime": config.runtime.model_copy(update={"host": pod.ip, "run_dir": run_dir}),
        }
    )


def _check_ports(config: SluiceConfig) -> None:
    ports = {
        "http.port": config.http.port,
        "grpc.port": config.grpc.port,
        "grpc.worker_port": config.grpc.worker_port,
        "pool.meta_port": config.pool.meta_port,
        "pool.config_port": config.pool.config_port,
        "pool.metrics_port": config.pool.metrics_port,
    }
    if open_ports := [name for name, port in ports.items() if port == 0]:
        raise ConfigError(
            "\n".join(f"{name} = 0: the other pods have to know the port; choose one" for name in open_ports)
        )


def _check_group(config: SluiceConfig, pod: Pod) -> None:
    groups = {Role.PREFILL: config.prefill.groups, Role.DECODE: config.decode.groups}.get(pod.role, 1)
    if pod.group >= groups:
        raise ConfigError(
            f"{pod.role}.groups = {groups} is the most that the deployment can be scaled to, but this pod would be "
            f"group {pod.group}; raise {pod.role}.groups in sluice.yaml and restart all pods"
        )
