"""What a pod runs, from the deployment's common configuration and its own name and address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from deploy import probe
from deploy.pod import health_targets, pod_processes, pod_run, stop_phases
from deploy.pod_plan import Pod, Role, pod_config
from engine.config import ConfigError, SluiceConfig, load_config
from engine.ports import free_port
from tests.certificates import NAME, Authority, section
from tests.checkpoints import PASSKEY_GLM
from tests.cluster import REPOSITORY

LOCAL = REPOSITORY / "deploy" / "k8s" / "overlays" / "local" / "sluice.yaml"


def configured(folder: Path, *overrides: str) -> SluiceConfig:
    fields = {
        "model.path": PASSKEY_GLM,
        "runtime.run_dir": folder / "run",
        "hostcann.root": folder / "devices",
        "pool.host": "10.96.0.9",
    }
    return load_config(LOCAL, [*(f"{field}={value}" for field, value in fields.items()), *overrides])


def pod(role: str, name: str = "", ip: str = "127.0.0.1") -> Pod:
    return Pod.of(role, {"POD_IP": ip, "POD_NAME": name})


def test_the_ordinal_is_the_group() -> None:
    assert pod("decode", "sluice-decode-12", "10.0.0.7") == Pod(Role.DECODE, 12, "10.0.0.7")
    assert pod("meta-server", "sluice-meta-server-6b4bb7fc97-8p25t").group == 0


@pytest.mark.parametrize(
    ("role", "environment", "text"),
    [
        ("router", {"POD_IP": "10.0.0.7"}, "role 'router': legal: meta-server, memcache-meta, prefill, decode"),
        ("decode", {"POD_NAME": "sluice-decode-0"}, "POD_IP is not set"),
        ("decode", {"POD_IP": "10.0.0.7", "POD_NAME": "sluice-decode-x"}, "'sluice-decode-x': must end with the group"),
    ],
)
def test_a_pod_that_cannot_tell_what_it_is_says_so(role: str, environment: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Pod.of(role, environment)


def test_only_a_pods_own_addresses_differ_from_the_common_configuration(tmp_path: Path) -> None:
    config = configured(tmp_path, "pool.host=sluice-pool")
    known = {"sluice-pool": "10.96.0.9"}.__getitem__
    worker = pod_config(config, pod("prefill", "sluice-prefill-1", "10.0.0.7"), "/run/x", known)
    assert (worker.runtime.host, worker.runtime.run_dir) == ("10.0.0.7", "/run/x")
    assert (worker.grpc.host, worker.pool_host) == ("sluice-meta", "10.96.0.9")
    meta = pod_config(config, pod("meta-server", ip="10.0.0.8"), "/run/x", known)
    assert (meta.grpc.host, meta.http.host, meta.pool_host) == ("0.0.0.0", "0.0.0.0", "10.96.0.9")
    service = pod_config(config, pod("memcache-meta", ip="10.0.0.9"), "/run/x", known)
    assert service.pool_host == "10.0.0.9"
    for one in (worker, meta, service):
        same = {"model", "kv", "hostcann", "prefill", "decode", "transfer", "faults"}
        assert one.model_dump(include=same) == config.model_dump(include=same)


def test_a_group_beyond_the_configured_ones_is_refused_with_the_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decode.groups = 2 is the most .* group 2; raise decode.groups"):
        pod_config(configured(tmp_path), pod("decode", "sluice-decode-2"), "/run/x")


def test_ports_that_others_must_know_are_not_left_open(tmp_path: Path) -> None:
    """Field failure F9: a server that never listened on the configured port."""
    config = configured(tmp_path, "grpc.worker_port=0", "pool.meta_port=0")
    with pytest.raises(ConfigError) as error:
        pod_config(config, pod("meta-server"), "/run/x")
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "grpc.worker_port = 0",
        "pool.meta_port = 0",
    ]


def test_a_pod_runs_all_ranks_of_its_group_and_the_leaders_stop_first(tmp_path: Path) -> None:
    config = configured(tmp_path, "prefill.tp=2", "decode.tp=2", "decode.dp=2", "grpc.worker_port=50100")
    with pod_run(config, pod("decode", "sluice-decode-1")) as run:
        specs = pod_processes(run, pod("decode", "sluice-decode-1"))
        names = ["decode-1/dp0/tp0", "decode-1/dp0/tp1", "decode-1/dp1/tp0", "decode-1/dp1/tp1"]
        assert [spec.name for spec in specs] == names
        assert all(spec.log is None for spec in specs), "a pod's processes write to the pod's own output"
        devices = [spec.argv[spec.argv.index("--device") + 1] for spec in specs]
        assert devices == ["8", "9", "10", "11"], "emulated devices are numbered through the deployment"
        assert [target.address for target in health_targets(run, specs)] == [f"127.0.0.1:{50100 + i}" for i in range(4)]
        phases = [(phase.prefixes, phase.seconds) for phase in stop_phases(config, specs)][1:]
        assert phases == [
            (("meta-server", "decode-1/dp0/tp0", "decode-1/dp1/tp0"), config.runtime.drain_s + 10.0),
            (("decode-1/dp0/tp1", "decode-1/dp1/tp1"), 10.0),
        ]
    assert not (tmp_path / "devices").exists()


def test_certificates_and_keys_are_read_where_they_are_used(tmp_path: Path) -> None:
    """MemCache's pod has no Secret; a pod that serves gRPC does not begin without it, and its probes trust it."""
    absent = configured(tmp_path, "security.worker_keys=/absent")
    with pod_run(absent, pod("memcache-meta")):
        pass
    for role in (pod("meta-server"), pod("prefill", "sluice-prefill-0"), pod("decode", "sluice-decode-0")):
        with (
            pytest.raises(ConfigError, match=r"security\.worker_keys = '/absent': cannot be read"),
            pod_run(absent, role),
        ):
            pass
    authority = Authority(tmp_path)
    fields = section(authority, authority.issue("pair"), server_name=NAME)
    secured = configured(tmp_path, *(f"security.{name}={value}" for name, value in fields.items()))
    here = pod("prefill", "sluice-prefill-0")
    with pod_run(secured, here) as run:
        targets = health_targets(run, pod_processes(run, here))
        probe.write_targets(tmp_path, targets)
    assert {(target.ca, target.server_name) for target in targets} == {(str(authority.file), NAME)}
    assert probe.read_targets(tmp_path) == targets


def test_probes_tell_alive_from_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Field failures F2, F3: a process that loads is alive and not ready, an unknown service is NOT_FOUND."""
    folder = ["--run-dir", str(tmp_path), "--timeout", "2"]
    assert probe.main(folder) == 1
    assert "no process has been started yet" in capsys.readouterr().out
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        servicer.set("sluice.v1.WorkerService", health_pb2.HealthCheckResponse.NOT_SERVING)
        probe.write_targets(tmp_path, [probe.Target(f"127.0.0.1:{port}", "sluice.v1.WorkerService")])
        assert (probe.main(folder), probe.main([*folder, "--alive"])) == (1, 0)
        assert "'sluice.v1.WorkerService': NOT_SERVING" in capsys.readouterr().out
        servicer.set("sluice.v1.WorkerService", health_pb2.HealthCheckResponse.SERVING)
        assert (probe.main(folder), probe.main([*folder, "--alive"])) == (0, 0)
        asked = ["--address", f"127.0.0.1:{port}", "--service", "sluice.v1.Unknown"]
        assert probe.main(asked) == 1
        assert "NOT_FOUND" in capsys.readouterr().out
    finally:
        server.stop(0)
    assert probe.main([*folder, "--alive", "--timeout", "0.3"]) == 1, "nobody answers"


def test_a_pod_ends_with_its_processes_and_with_a_signal(tmp_path: Path) -> None:
    """The meta server's pod: ready to be asked within seconds, status 0 after SIGTERM, 1 after a death."""
    fields = {field: free_port("127.0.0.1") for field in ("http.port", "grpc.port", "grpc.worker_port")}
    paths = {"model.path": PASSKEY_GLM, "runtime.run_dir": tmp_path, "hostcann.root": tmp_path / "devices"}
    command = [sys.executable, "-m", "deploy.pod", "meta-server", "--config", str(LOCAL)]
    for field, value in {**fields, **paths, "runtime.drain_s": 0, "pool.host": "127.0.0.1"}.items():
        command += ["--set", f"{field}={value}"]

    def started() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, env={"PATH": "/bin", "POD_IP": "127.0.0.1"}, cwd=REPOSITORY)
        deadline = time.monotonic() + 30
        while probe.main(["--run-dir", str(tmp_path), "--alive", "--timeout", "1"]):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        return process

    process = started()
    process.terminate()
    assert process.wait(15) == 0
    (tmp_path / "health_targets").unlink()
    process = started()
    (child,) = (int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    os.kill(child, signal.SIGKILL)
    assert process.wait(15) == 1
