"""Addresses of a deployment over several machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.spread import ClusterPlan
from engine.config import build_config
from transfer import build_folder as module
from transfer.build_folder import build_folder

HOST = "127.0.0.1"


def plan(**sections: dict[str, object]) -> ClusterPlan:
    open_ports = {"http": {"port": 0}, "grpc": {"port": 0}}
    return ClusterPlan.of(build_config({"model": {"path": "/models/glm"}} | open_ports | sections), HOST)


def test_every_port_that_others_need_is_chosen() -> None:
    chosen = plan()
    config = chosen.config
    ports = [config.http.port, config.grpc.port, config.pool.meta_port, config.pool.config_port]
    assert all(ports) and len(set(ports)) == 4
    assert chosen.http_url == f"http://{HOST}:{config.http.port}"
    assert chosen.grpc_address == f"{HOST}:{config.grpc.port}"


def test_units_know_the_meta_server_by_an_address_that_they_reach() -> None:
    everywhere = plan(grpc={"host": "0.0.0.0", "port": 0}, http={"host": "0.0.0.0", "port": 0})
    assert everywhere.for_servers.grpc.host == "0.0.0.0"
    assert everywhere.for_units.grpc.host == HOST
    assert everywhere.for_units.pool_host == everywhere.for_servers.pool_host == HOST
    assert everywhere.http_url.startswith(f"http://{HOST}:")


def test_a_meta_server_on_loopback_listens_where_the_units_are() -> None:
    other = ClusterPlan.of(
        build_config({"model": {"path": "/m"}, "grpc": {"port": 0}, "http": {"port": 0}}), "127.0.0.2"
    )
    assert other.for_servers.grpc.host == other.for_units.grpc.host == "127.0.0.2"
    assert other.config.http.host == "127.0.0.1", "who may reach the OpenAI API is the user's decision"


def test_processes_are_started_again_and_share_device_memory() -> None:
    config = plan().config
    assert config.runtime.restart
    assert config.hostcann.root is not None and config.hostcann.root != plan().config.hostcann.root


def test_a_checkpoint_in_the_working_directory_is_one_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan(model={"path": str(tmp_path / "models" / "glm")}).config.model.path == "models/glm"
    assert plan(model={"path": "/models/glm"}).config.model.path == "/models/glm"


def test_code_that_was_copied_without_its_build_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "transfer" / "build_folder.py"))
    assert build_folder.__wrapped__() == Path(__file__).resolve().parents[2] / "build"
    (tmp_path / "build").mkdir()
    assert build_folder.__wrapped__() == tmp_path / "build"
