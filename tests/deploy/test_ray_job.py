"""The parts of a Ray job that need no cluster; tests/ray runs the rest on a real one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import ray.util

from deploy import processes
from deploy.ray_job_actor import UnitActor
from deploy.units import units
from engine.config import ConfigError, build_config
from tests.cluster import REPOSITORY

PACKAGES = ("engine", "transfer", "prefill_node", "decode_node", "meta_server", "deploy")


def imports(file: Path) -> set[str]:
    """Top-level packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_only_the_job_needs_ray() -> None:
    users = {f.name for package in PACKAGES for f in (REPOSITORY / package).rglob("*.py") if "ray" in imports(f)}
    assert users and all(name.startswith("ray_job") for name in users)


def test_on_npus_a_unit_that_asks_for_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the resource Ray hides no device, and two units of a node would take the same ones."""
    monkeypatch.setattr(processes, "has_driver", lambda: True)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    config = build_config({"model": {"path": "/models/glm"}})
    with pytest.raises(ConfigError, match=r"ray\.decode_resources names no NPU.*decode-0/dp0"):
        UnitActor(units(config)[1]).start(config)


def test_an_actor_without_processes_has_nothing_to_tell() -> None:
    actor = UnitActor(units(build_config({"model": {"path": "/models/glm"}}))[0])
    assert repr(actor) == "prefill-0" and actor.look() == [] and actor.stop(1.0) == []
