"""Addresses of a deployment whose servers run on one machine and whose units run on several."""

from __future__ import annotations

import ipaddress
import secrets
from dataclasses import dataclass
from pathlib import Path

from deploy import processes
from deploy.device_root import default_parent
from deploy.resolve import filled
from engine.config import SluiceConfig

_ANY = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class ClusterPlan:
    """The configuration without open fields, except what each machine knows of itself.

    `host` is the address of the machine with the servers (the meta server and MemCache's MetaService).
    """

    config: SluiceConfig
    host: str

    @classmethod
    def of(cls, config: SluiceConfig, host: str) -> ClusterPlan:
        """To be called on the machine with the servers. Raises ConfigError: a port is in use.

        A meta server that would listen on the loopback interface listens on `host`, where the units reach it. Their
        processes are started again when they die. A checkpoint in the current folder is one in theirs.
        """
        grpc_host = host if _is_loopback(config.grpc.host) else config.grpc.host
        open_ = config.model_copy(
            update={
                "model": config.model.model_copy(update={"path": _relative(config.model.path)}),
                "hostcann": config.hostcann.model_copy(
                    update={"root": config.hostcann.root or str(default_parent() / f"job-{secrets.token_hex(4)}")}
                ),
                "grpc": config.grpc.model_copy(update={"host": grpc_host}),
                "pool": config.pool.model_copy(update={"host": host}),
                "runtime": config.runtime.model_copy(update={"host": host, "restart": True}),
            }
        )
        return cls(filled(open_), host)

    @property
    def for_servers(self) -> SluiceConfig:
        return self.config

    @property
    def for_units(self) -> SluiceConfig:
        """Here `grpc.host` is where the meta server is reached, not what it listens on."""
        grpc = self.config.grpc.model_copy(update={"host": self._reached(self.config.grpc.host)})
        return self.config.model_copy(update={"grpc": grpc})

    @property
    def grpc_address(self) -> str:
        return f"{self._reached(self.config.grpc.host)}:{self.config.grpc.port}"

    @property
    def grpc_url(self) -> str:
        """For people: `grpcs` means TLS."""
        return f"{self.config.security.grpc_scheme}://{self.grpc_address}"

    @property
    def http_url(self) -> str:
        return f"{self.config.security.http_scheme}://{self._reached(self.config.http.host)}:{self.config.http.port}"

    @property
    def listening(self) -> dict[str, tuple[str, int]]:
        """Host and port of each server by its process's name."""
        return {
            processes.POOL_SERVICE: (self.host, self.config.pool.config_port),
            processes.META_SERVER: (self._reached(self.config.grpc.host), self.config.grpc.port),
        }

    def _reached(self, host: str) -> str:
        return self.host if host in _ANY else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _relative(path: str) -> str:
    """Machines may hold copies of the current folder in different places."""
    here, full = Path.cwd(), Path(path).resolve()
    return str(full.relative_to(here)) if full.is_relative_to(here) else str(full)
