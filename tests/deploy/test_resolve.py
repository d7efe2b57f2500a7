"""What a run's configuration file, folders and ports are, and what is refused before anything starts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import ports
from deploy.device_root import DeviceRoot, sweep_dead
from deploy.ports import LocalHost, PortChooser
from deploy.processes import workers
from deploy.resolve import filled, resolved
from deploy.signals import Stopped
from engine.config import ConfigError, SluiceConfig, build_config, load_config
from tests.certificates import Authority, section
from tests.checkpoints import tiny_config


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config("glm_moe_dsa")))
    (folder / "model.safetensors").write_bytes(weights(16))
    return folder


def weights(held: int) -> bytes:
    """A file whose header names 16 bytes of tensors, with `held` of them."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(held)


def configured(model_dir: Path, **sections: dict[str, object]) -> SluiceConfig:
    tree = {"model": {"path": str(model_dir)}, "http": {"port": 0}, "grpc": {"port": 0}}
    return build_config(tree | sections)


def test_every_open_field_is_filled_and_the_file_says_the_same(model_dir: Path) -> None:
    with resolved(configured(model_dir, decode={"dp": 2, "host_pool_bytes": "64MiB"})) as run:
        config = load_config(run.config_file)
        assert config == run.config
        ports = [config.http.port, config.grpc.port, config.transfer.store_port]
        ports += [config.pool.meta_port, config.pool.config_port, config.pool.metrics_port]
        assert 0 not in ports and len(set(ports)) == len(ports)
        assert config.hostcann.devices == 3 and config.model.name == "model"
        assert Path(str(config.hostcann.root)).is_dir() and run.run_dir.is_dir()
    assert not run.run_dir.exists() and not run.device_root.exists()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A temporary folder whose name leaves room for sockets."""
    with tempfile.TemporaryDirectory(prefix="sluice-t-", dir="/tmp") as folder:
        yield Path(folder)


def test_a_named_run_folder_stays_and_serves_one_deployment_at_a_time(model_dir: Path, short_dir: Path) -> None:
    config = configured(model_dir, runtime={"run_dir": str(short_dir / "run")})
    with resolved(config) as run:
        (run.log_dir / "a.log").write_text("kept")
        with pytest.raises(ConfigError, match=r"runtime\.run_dir.*used by another"), resolved(config):
            pass
    assert (run.log_dir / "a.log").read_text() == "kept"
    with resolved(config):
        pass


def test_a_run_folder_too_long_for_sockets_is_refused(model_dir: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"runtime\.run_dir.*too long"),
        resolved(configured(model_dir, runtime={"run_dir": "/tmp/" + "x" * 80})),
    ):
        pass


def test_a_port_in_use_is_refused_with_its_field(model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=rf"http\.port = {port}: already in use"),
            resolved(configured(model_dir, http={"port": port})),
        ):
            pass


def test_two_fields_with_one_port_are_refused() -> None:
    chooser = PortChooser()
    host = LocalHost.of("http.host", "127.0.0.1")
    port = chooser.choose("http.port", host, 0)
    with pytest.raises(ConfigError, match=rf"grpc\.port = {port}: same as http\.port"):
        chooser.choose("grpc.port", host, port)


@pytest.mark.parametrize("section", ["http", "grpc", "runtime", "pool"])
def test_a_host_that_is_not_this_machine_is_named_by_its_field(model_dir: Path, section: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.host = '192\.0\.2\.1': is not an address of this machine"):
        filled(configured(model_dir, **{section: {"host": "192.0.2.1"}}))


def test_a_host_without_an_address_is_looked_up_once(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def unknown(name: str) -> str:
        asked.append(name)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(ports.socket, "gethostbyname", unknown)
    config = configured(model_dir, runtime={"host": "nosuchhost"})
    with pytest.raises(ConfigError, match=r"runtime\.host = 'nosuchhost': cannot be resolved"), resolved(config):
        pass
    assert asked == ["nosuchhost"]


def test_a_signal_ends_the_wait_for_a_name_server(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = threading.Event()
    monkeypatch.setattr(ports.socket, "gethostbyname", lambda _: silent.wait(60))

    def stopped(_: float) -> None:
        raise Stopped

    with pytest.raises(Stopped), resolved(configured(model_dir), stopped):
        pass
    silent.set()


def test_the_folder_stays_when_a_process_died_in_it(model_dir: Path) -> None:
    with pytest.raises(Stopped), resolved(configured(model_dir)) as run:
        run.keep()
        raise Stopped
    assert run.log_dir.is_dir()
    shutil.rmtree(run.run_dir)


def test_a_certificate_without_the_address_that_is_called_ends_the_start(model_dir: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    security = section(authority, authority.issue("server"))
    with resolved(configured(model_dir, security=security)):
        pass
    elsewhere = configured(model_dir, security=security, grpc={"host": "127.0.0.2", "port": 0})
    with pytest.raises(ConfigError, match=r"callers of grpc\.host = '127\.0\.0\.2' would refuse"), resolved(elsewhere):
        pass


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*config\.json"), resolved(configured(tmp_path / "absent")):
        pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"model\.path: .*/model: no \*\.safetensors files"),
        (
            weights(15),
            r"model\.path: .*/model\.safetensors: is cut short: its tensors need \d+ bytes, the file has",
        ),
        (weights(16)[:20], r"is cut short: its header takes"),
        (b"", "is not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "is not a safetensors file"),
    ],
)
def test_weights_that_are_not_whole_are_refused_before_anything_starts(
    model_dir: Path, content: bytes | None, message: str
) -> None:
    file = model_dir / "model.safetensors"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refused, resolved(configured(model_dir)):
        pass
    assert "\n" not in str(refused.value)


def test_an_index_that_names_absent_files_is_refused(model_dir: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"do not exist: model-2\.safetensors"), resolved(configured(model_dir)):
        pass


def test_the_url_says_that_grpc_speaks_tls(model_dir: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with resolved(configured(model_dir)) as run:
        assert run.grpc_url.startswith("grpc://127.0.0.1:")
    with resolved(configured(model_dir, security=section(authority, authority.issue("server")))) as run:
        assert run.grpc_url.startswith("grpcs://127.0.0.1:") and run.http_url.startswith("https://")


def test_the_root_of_a_dead_launcher_is_swept_and_a_live_one_is_not(tmp_path: Path) -> None:
    live, dead = DeviceRoot(tmp_path / "live"), DeviceRoot(tmp_path / "dead")
    os.close(dead._lock)  # what the kernel does when the launcher is killed
    assert sweep_dead(tmp_path) == [tmp_path / "dead"]
    assert (tmp_path / "live").is_dir() and not (tmp_path / "dead").exists()
    live.close()


def test_a_locked_root_is_refused(tmp_path: Path) -> None:
    root = DeviceRoot(tmp_path / "root")
    with pytest.raises(BlockingIOError):
        DeviceRoot(tmp_path / "root")
    root.close()
    assert not (tmp_path / "root").exists()


def test_worker_processes_follow_the_topology(model_dir: Path) -> None:
    config = configured(model_dir, prefill={"groups": 2, "tp": 2, "threads": 3}, decode={"dp": 2, "tp": 1})
    with resolved(config) as run:
        specs = workers(run)
    assert [spec.name for spec in specs] == [
        "prefill-0/tp0",
        "prefill-0/tp1",
        "prefill-1/tp0",
        "prefill-1/tp1",
        "decode-0/dp0/tp0",
        "decode-0/dp1/tp0",
    ]
    assert specs[3].argv[2:] == [
        "prefill_node.main",
        *("--config", str(run.config_file), "--group", "1", "--tp-rank", "1"),
        *("--rendezvous", f"file://{run.run_dir}/prefill-1.rendezvous", "--device", "3", "--grpc-port", "0"),
    ]
    assert specs[3].env["OMP_NUM_THREADS"] == "3"
    assert shutil.which(specs[0].argv[0])
