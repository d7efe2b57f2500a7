"""The units in which a deployment is placed on machines: sets of ranks that have to be on the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from deploy import processes
from deploy.child import ChildSpec
from deploy.resolve import Run
from engine.config import SluiceConfig

_NOT_SHOWN = ("memory", "object_store_memory")


@dataclass(frozen=True)
class Unit:
    """The TP ranks of a prefill group, or of one DP rank of a decode group.

    They meet in a folder and share memory, so no placement may part them. `resources` are those of all its ranks
    together, by the names of Ray.
    """

    role: Literal["prefill", "decode"]
    group: int
    dp_rank: int  # 0 for prefill
    ranks: int
    resources: Mapping[str, float]

    @property
    def name(self) -> str:
        """As `unit_of` in deploy/restarts.py has it."""
        return f"prefill-{self.group}" if self.role == "prefill" else f"decode-{self.group}/dp{self.dp_rank}"

    def processes(self, run: Run) -> list[ChildSpec]:
        """Its worker processes, on the machine where they are to run.

        With a real driver a unit sees the devices it was given, numbered from 0. Emulated ones are shared by the units
        of a machine and numbered through the deployment.
        """
        config, local = run.config, processes.has_driver()
        if self.role == "prefill":
            device = 0 if local else config.prefill_device(self.group, 0)
            return processes.prefill_group(run, self.group, processes.Room(device, 0))
        device = 0 if local else config.decode_device(self.group, self.dp_rank, 0)
        return processes.decode_replica(run, self.group, self.dp_rank, processes.Room(device, 0))

    def __str__(self) -> str:
        needs = ", ".join(f"{name} {amount:g}" for name, amount in self.resources.items())
        return f"{self.name} ({needs or 'no resources'})"


def units(config: SluiceConfig) -> list[Unit]:
    """All units, prefill before decode."""
    prefill, decode, ray = config.prefill, config.decode, config.ray
    found = [
        Unit("prefill", group, 0, prefill.tp, _resources(config, prefill.tp, ray.prefill_resources))
        for group in range(prefill.groups)
    ]
    found += [
        Unit("decode", group, dp_rank, decode.tp, _resources(config, decode.tp, ray.decode_resources))
        for group in range(decode.groups)
        for dp_rank in range(decode.dp)
    ]
    return found


def _resources(config: SluiceConfig, ranks: int, custom: Mapping[str, float]) -> dict[str, float]:
    per_rank = {"CPU": config.ray.cpus_per_rank, **custom}
    return {name: amount * ranks for name, amount in per_rank.items() if amount}


def why_not_placed(units: Sequence[Unit], nodes: Mapping[str, Mapping[str, float]], strategy: str) -> str:
    """What stands in the way of placing `units` on `nodes`, whose resources are totals by node name."""
    shown = "; ".join(f"{name} has {_amounts(has)}" for name, has in nodes.items()) or "there are no nodes"
    too_big = [unit for unit in units if not any(_fits(unit, has) for has in nodes.values())]
    if too_big:
        names = {name for unit in too_big for name in unit.resources}
        unknown = sorted(name for name in names if not any(name in has for has in nodes.values()))
        hint = f"; no node has a resource {' or '.join(unknown)}" if unknown else ""
        return f"{', '.join(map(str, too_big))} fit no node{hint}: {shown}"
    if strategy == "strict_spread" and len(units) > len(nodes):
        return f"ray.strategy = strict_spread puts {len(units)} units on nodes of their own, and there are {len(nodes)}"
    return f"{', '.join(map(str, units))} find no room beside each other and what else runs: {shown}"


def _fits(unit: Unit, has: Mapping[str, float]) -> bool:
    return all(has.get(name, 0.0) >= amount for name, amount in unit.resources.items())


def _amounts(resources: Mapping[str, float]) -> str:
    """Without Ray's own bookkeeping, such as `node:10.0.0.1`."""
    own = {name: has for name, has in resources.items() if name not in _NOT_SHOWN and ":" not in name}
    return ", ".join(f"{name} {has:g}" for name, has in sorted(own.items()))
