"""What a user types: sluice up, status and generate, against real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from benchmarks.passkey import make_prompt
from tests.checkpoints import PASSKEY_GLM
from tests.cluster import CONFIG, REPOSITORY, Cluster
from tests.e2e.conftest import BASE

pytestmark = pytest.mark.cluster


def sluice(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=REPOSITORY, timeout=120)


def test_status_shows_workers_pools_and_topology(passkey_cluster: Cluster) -> None:
    result = sluice("status", "--json", "--address", passkey_cluster.grpc_address)
    assert result.returncode == 0, result.stderr
    status = json.loads(result.stdout)
    assert status["ready"] and status["requests_in_flight"] == 0
    workers = {worker["info"]["worker_id"]: worker for worker in status["workers"]}
    assert set(workers) == {"prefill-0/tp0", "decode-0/dp0/tp0"}
    pools = {pool["name"]: pool for pool in workers["decode-0/dp0/tp0"]["status"]["pools"]}
    assert {"host_blocks", "indexer_blocks", "hot_rows"} <= set(pools)
    assert all(pool["used"] == 0 and pool["total"] > 0 for pool in pools.values())
    table = sluice("status", "--address", passkey_cluster.grpc_address)
    assert table.returncode == 0 and "decode-0/dp0/tp0" in table.stdout and "host_blocks" in table.stdout
    assert "…" not in table.stdout, "a column was cut off in a pipe"


def test_generate_answers_a_passkey_question(passkey_cluster: Cluster) -> None:
    text, answer = make_prompt(1500, 0.3, 11)
    options = ["--stop", "\n", "--address", passkey_cluster.grpc_address]
    result = sluice("generate", "--prompt", "-", *options, stdin=text)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(f"is {answer}.\n") and "finish: stop" in result.stderr


def test_generate_with_token_ids(passkey_cluster: Cluster) -> None:
    options = ["--max-tokens", "3", "--ignore-eos", "--address", passkey_cluster.grpc_address]
    assert "3 generated, finish: length" in sluice("generate", "--tokens", "5,6,7", *options).stderr
    refused = sluice("generate", "--tokens", "5,9999", *options)
    assert refused.returncode == 1 and "9999" in refused.stderr and "Traceback" not in refused.stderr


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def readme_lines(program: str) -> list[str]:
    """The commands of README.md that begin so, without comments, continued lines joined."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.partition("  #")[0] for line in text.splitlines() if line.startswith(f"{program} ")]


@pytest.mark.parametrize(
    ("program", "count", "said"),
    [
        ("sluice status", 1, "decode-0/dp0/tp0"),
        ("sluice generate", 1, "40213"),
        pytest.param("curl", 1, '"token_ids":[', marks=needs_curl),
        ("buf curl", 2, '"status": "SERVING"'),
    ],
)
def test_commands_of_the_readme(passkey_cluster: Cluster, program: str, count: int, said: str) -> None:
    """As they stand there, but for ports."""
    output = ""
    lines = readme_lines(program)
    for line in lines:
        command = line.replace("localhost:8000", passkey_cluster.http_url.removeprefix("http://"))
        command = command.replace("localhost:50051", passkey_cluster.grpc_address)
        if program.startswith("sluice"):
            command += f" --address {passkey_cluster.grpc_address}"
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", command], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        output += done.stdout
    assert len(lines) == count
    assert said in output


def test_planning_as_in_the_readme(tmp_path: Path) -> None:
    """With a checkpoint of GLM-5's shape where the line has one."""
    shutil.copytree(REPOSITORY / "tests" / "full_size" / "glm-5", tmp_path / "models" / "GLM-5")
    (line,) = readme_lines("sluice plan")
    command = line.replace("sluice", f"{sys.executable} -m deploy.cli", 1)
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # 1: the load does not fit the defaults, and it says what would
    assert "9 requests of 131,072 tokens" in done.stdout


def test_worker_that_cannot_start_is_named_with_its_reason(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(PASSKEY_GLM, model)
    weights = model / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes().replace(b'"model.norm.weight"', b'"model.nose.weight"', 1))
    with tempfile.TemporaryDirectory(prefix="sluice-t-", dir="/tmp") as run_dir:
        fields = ["--set", "http.port=0", "--set", "grpc.port=0", "--set", f"runtime.run_dir={run_dir}"]
        result = sluice("up", "--config", str(CONFIG), "--model", str(model), *fields)
    assert result.returncode == 1
    assert "/tp0 (pid " in result.stderr and "exit status 1" in result.stderr
    assert "model.norm.weight" in result.stderr
    assert f"a process had died; the logs stay in {run_dir}" in result.stdout
    assert "sluice ready" not in result.stdout


def test_killed_launcher_leaves_no_process_and_the_next_start_sweeps_memory() -> None:
    with Cluster(PASSKEY_GLM, BASE) as survivor:
        survivor.complete([5, 6, 7], 1)
        with Cluster(PASSKEY_GLM, BASE) as victim:
            victim.kill_launcher()
            gone, alive = psutil.wait_procs(victim.processes, timeout=10)
            assert not alive and len(gone) >= 4, "the servers, the workers and what they started"
        assert victim.root.is_dir(), "there would be nothing to sweep"
        with Cluster(PASSKEY_GLM, BASE):
            assert not victim.root.exists()
        assert len(survivor.complete([5, 6, 7], 2, ignore_eos=True).tokens) == 2


def test_dead_meta_server_ends_a_deployment_without_restarts() -> None:
    with Cluster(PASSKEY_GLM, BASE | {"runtime.restart": "false"}) as cluster:
        cluster.process_of("meta_server.main").kill()
        assert cluster.wait_exit() == 1
        assert cluster.said("meta-server (pid ") and cluster.said("killed by SIGKILL")
