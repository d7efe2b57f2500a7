"""The actor that holds one unit of a deployment on the node where Ray has placed it."""

from __future__ import annotations

import ray.util

from deploy import processes
from deploy.part import Part
from deploy.ports import LocalHost, PortChooser
from deploy.resolve import check
from deploy.supervisor import StopPhase
from deploy.units import Unit
from engine.config import ConfigError, SluiceConfig


class UnitActor:
    """Supervises a unit's processes, which are its children and end with it however it ends.

    Its methods run one after the other in the main thread. The job calls `look` all the time; an actor that is not
    asked any more belongs to a job that is dead, and Ray ends it.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._part: Part | None = None

    def __repr__(self) -> str:  # what Ray puts in front of lines in the job's log
        return self._unit.name

    def start(self, config: SluiceConfig) -> str:
        """Starts the processes and returns this node's address. `config` lacks only what differs from node to node.

        Raises ConfigError: the checkpoint is not on this node, a folder or port cannot be used, no NPUs are asked for.
        """
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        local = LocalHost.of("runtime.host", host)
        store_port = PortChooser().choose("transfer.store_port", local, config.transfer.store_port)
        here = config.model_copy(
            update={
                "runtime": config.runtime.model_copy(update={"host": host}),
                "transfer": config.transfer.model_copy(update={"store_port": store_port}),
            }
        )
        if processes.has_driver() and "NPU" not in self._unit.resources:
            raise ConfigError(
                f"ray.{self._unit.role}_resources names no NPU, so Ray gives {self._unit.name} none on {host}"
            )
        check(here)
        self._part = Part(here, self._unit.name, self._unit.processes)
        return host

    def look(self) -> list[str]:
        """Starts again what has died; returns what has happened since the last call, for the job's log."""
        return [] if self._part is None else self._part.look()

    def stop(self, within_s: float) -> list[str]:
        """Ends the processes, removes what they leave; returns the names of those that had to be killed."""
        part, self._part = self._part, None
        return [] if part is None else part.stop([StopPhase((f"{self._unit.name}/",), within_s)])
