"""What is placed together, what it takes, and why it may find no room."""

from __future__ import annotations

import pytest

from deploy import processes
from deploy.resolve import written
from deploy.restarts import unit_of
from deploy.units import units, why_not_placed
from engine.config import ConfigError, SluiceConfig, build_config


def config(**sections: dict[str, object]) -> SluiceConfig:
    return build_config({"model": {"path": "/models/glm"}, **sections})


LARGE = config(
    prefill={"groups": 2, "tp": 4},
    decode={"groups": 1, "dp": 2, "tp": 2},
    ray={"cpus_per_rank": 2, "prefill_resources": {"NPU": 1}, "decode_resources": {"NPU": 1, "decode_node": 0.5}},
)


def test_a_unit_has_all_ranks_of_a_tp_group() -> None:
    assert [(unit.name, unit.ranks, dict(unit.resources)) for unit in units(LARGE)] == [
        ("prefill-0", 4, {"CPU": 8, "NPU": 4}),
        ("prefill-1", 4, {"CPU": 8, "NPU": 4}),
        ("decode-0/dp0", 2, {"CPU": 4, "NPU": 2, "decode_node": 1}),
        ("decode-0/dp1", 2, {"CPU": 4, "NPU": 2, "decode_node": 1}),
    ]


def test_every_worker_belongs_to_one_unit(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = written(LARGE, tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("root"))
    assert [spec for unit in units(LARGE) for spec in unit.processes(run)] == processes.workers(run)
    assert all(unit_of(spec.name) == unit.name for unit in units(LARGE) for spec in unit.processes(run))


def test_on_npus_a_unit_numbers_the_devices_it_was_given(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "has_driver", lambda: True)
    run = written(LARGE, tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("root"))
    for unit in units(LARGE):
        argv = [list(spec.argv) for spec in unit.processes(run)]
        assert [arguments[arguments.index("--device") + 1] for arguments in argv] == [str(n) for n in range(unit.ranks)]


def test_resources_of_ray_itself_are_refused_as_custom_ones() -> None:
    with pytest.raises(ConfigError, match=r"ray\.prefill_resources.*CPU.*are Ray's own"):
        config(ray={"prefill_resources": {"CPU": 1}})


@pytest.mark.parametrize(
    ("nodes", "strategy", "reason"),
    [
        ({}, "pack", "fit no node; no node has a resource CPU or NPU or decode_node: there are no nodes"),
        ({"a": {"CPU": 64.0}}, "pack", "no node has a resource NPU or decode_node: a has CPU 64"),
        (
            {"a": {"CPU": 64.0, "NPU": 2.0, "decode_node": 9.0, "memory": 1e9, "node:10.0.0.1": 1.0}},
            "pack",
            "prefill-0 (CPU 8, NPU 4), prefill-1 (CPU 8, NPU 4) fit no node: a has CPU 64, NPU 2, decode_node 9",
        ),
        (
            {"a": {"CPU": 64.0, "NPU": 16.0, "decode_node": 9.0}},
            "strict_spread",
            "strict_spread puts 4 units on nodes of their own, and there are 1",
        ),
        ({"a": {"CPU": 9.0, "NPU": 4.0, "decode_node": 9.0}}, "spread", "find no room beside each other"),
    ],
)
def test_why_there_is_no_room(nodes: dict[str, dict[str, float]], strategy: str, reason: str) -> None:
    assert reason in why_not_placed(units(LARGE), nodes, strategy)
