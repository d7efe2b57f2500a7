"""What a user types: sluice up, status and generate, against real processes."""

from __future__ import annotations

import json
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


def test_worker_that_cannot_start_is_named_with_its_reason(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(PASSKEY_GLM, model)
    weights = model / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:5000])
    with tempfile.TemporaryDirectory(prefix="sluice-t-", dir="/tmp") as run_dir:
        fields = ["--set", "http.port=0", "--set", "grpc.port=0", "--set", f"runtime.run_dir={run_dir}"]
        result = sluice("up", "--config", str(CONFIG), "--model", str(model), *fields)
    assert result.returncode == 1
    assert "/tp0 (pid " in result.stderr and "exit status 1" in result.stderr
    assert "model.safetensors" in result.stderr
    assert "sluice ready" not in result.stdout


def test_killed_launcher_leaves_no_process_and_the_next_start_sweeps_memory() -> None:
    with Cluster(PASSKEY_GLM, BASE) as survivor:
        survivor.complete([5, 6, 7], 1)
        with Cluster(PASSKEY_GLM, BASE) as victim:
            victim.kill_launcher()
            gone, alive = psutil.wait_procs(victim.processes, timeout=10)
            assert not alive and len(gone) == 4
        assert victim.root.is_dir(), "there would be nothing to sweep"
        with Cluster(PASSKEY_GLM, BASE):
            assert not victim.root.exists()
        assert len(survivor.complete([5, 6, 7], 2, ignore_eos=True).tokens) == 2


def test_dead_meta_server_ends_a_deployment_without_restarts() -> None:
    with Cluster(PASSKEY_GLM, BASE | {"runtime.restart": "false"}) as cluster:
        cluster.process_of("meta_server.main").kill()
        assert cluster.wait_exit() == 1
        assert cluster.said("meta-server (pid ") and cluster.said("killed by SIGKILL")
