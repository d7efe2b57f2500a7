"""Where units run: one placement group of Ray, with one bundle per unit."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import ray
import ray.util
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.ray_job_actor import UnitActor
from deploy.units import Unit, why_not_placed
from engine.config import ConfigError


class Placement:
    """Reserves room for all units at once, and gives it back at the end of the block.

    A bundle never spans nodes, so the ranks of a unit stay together; the strategy says how far units keep apart. When
    a node is lost, Ray looks for other room for its bundles, and the others stay where they are.
    """

    def __init__(self, units: Sequence[Unit], strategy: str) -> None:
        """Raises ConfigError for a unit that takes nothing, which Ray cannot place."""
        if idle := [unit.name for unit in units if not unit.resources]:
            raise ConfigError(f"ray.cpus_per_rank = 0: {', '.join(idle)} would take nothing; name custom resources")
        self._units = list(units)
        self._strategy = strategy
        bundles = [dict(unit.resources) for unit in units]
        self._group = ray.util.placement_group(bundles, strategy=strategy.upper())
        self._ready = self._group.ready()

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        ray.util.remove_placement_group(self._group)

    def complete(self) -> bool:
        """Whether every unit has room. Does not wait."""
        return bool(ray.wait([self._ready], timeout=0)[0])

    def explain(self) -> str:
        """What stands in the way of a placement that is not complete."""
        nodes = {
            f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})": node["Resources"]
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"]
        }
        return why_not_placed(self._units, nodes, self._strategy)

    def actor(self, index: int) -> Any:
        """A new actor for unit `index`, in its bundle; it comes to life when the bundle has a node."""
        unit = self._units[index]
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        custom = {name: amount for name, amount in unit.resources.items() if name != "CPU"}
        place_in = ray.remote(UnitActor).options(
            num_cpus=unit.resources.get("CPU", 0), resources=custom, max_restarts=0, scheduling_strategy=place
        )
        return place_in.remote(unit)
