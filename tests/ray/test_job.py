"""`ray job submit`, deaths and `ray job stop`, on a real Ray head."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest
import yaml

from deploy.client import Client
from tests.checkpoints import PASSKEY_GLM
from tests.cluster import REPOSITORY
from tests.oracle import Oracle, assert_tokens_match
from tests.ray.ray_cli import RayHead, deployment_processes, documented, folders_of, options, run, wait_for
from tests.ray.requests import PROMPT, greedy, pids

WORKERS = {"prefill-0/tp0", "prefill-0/tp1", "decode-0/dp0/tp0"}
pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with RayHead() as started:
        yield started


@pytest.fixture(scope="module")
def deployment(head: RayHead) -> Iterator[tuple[str, Client]]:
    """HTTP URL and client of one deployment, whose prefill group has two ranks."""
    head.submit("served", *options(prefill__tp=2, http__port=8000))
    http_url, grpc_address = head.wait_ready("served")
    with Client(grpc_address) as client:
        yield http_url, client


def test_completion_equals_the_oracle(deployment: tuple[str, Client]) -> None:
    http_url, client = deployment
    expected = Oracle(PASSKEY_GLM).greedy(PROMPT, 24)
    assert_tokens_match(list(greedy(client, 24)), expected)
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    answer = httpx.post(f"{http_url}/v1/completions", json=body, timeout=60).json()
    assert_tokens_match(answer["choices"][0]["token_ids"], expected)


def test_the_documented_request_is_answered(deployment: tuple[str, Client]) -> None:
    answer = json.loads(run("bash", "-c", documented("curl localhost:8000")))
    assert answer["usage"]["completion_tokens"] == 8 and deployment[0] == "http://127.0.0.1:8000"


def test_the_log_shows_progress_and_addresses(head: RayHead, deployment: tuple[str, Client]) -> None:
    log = head.log("served")
    assert "prefill-0 is placed on 127.0.0.1" in log and "decode-0/dp0 is placed on 127.0.0.1" in log
    assert all(f"{worker}: ready" in log for worker in WORKERS)
    assert f"sluice ready {deployment[0]} grpc://{deployment[1].address}" in log


def test_a_killed_worker_is_replaced_and_its_stream_goes_on(head: RayHead, deployment: tuple[str, Client]) -> None:
    _, client = deployment
    victim = pids(client)["decode-0/dp0/tp0"]
    stream = greedy(client, 120)
    tokens = [next(stream) for _ in range(10)]
    os.kill(victim, signal.SIGKILL)
    assert_tokens_match([*tokens, *stream], Oracle(PASSKEY_GLM).greedy(PROMPT, 120))
    assert pids(client)["decode-0/dp0/tp0"] != victim
    assert "starting decode-0/dp0 again" in head.log("served")


def test_processes_end_with_their_actor_and_the_unit_is_placed_again(
    head: RayHead, deployment: tuple[str, Client]
) -> None:
    _, client = deployment
    before = pids(client)
    ranks = [psutil.Process(before[f"prefill-0/tp{rank}"]) for rank in range(2)]
    actor = ranks[0].parent()
    assert actor is not None and actor == ranks[1].parent(), "the ranks of a group belong to one actor"
    folder = next(path for path in folders_of(ranks) if path.name.startswith("sluice-prefill-0-"))
    actor.kill()
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive
    wait_for(lambda: set(pids(client)) == WORKERS and pids(client) != before, 60, lambda: head.log("served"))
    assert_tokens_match(list(greedy(client, 24)), Oracle(PASSKEY_GLM).greedy(PROMPT, 24))
    assert "prefill-0 is lost: " in head.log("served")
    assert not folder.exists(), "the dead actor's run folder is still there"


def test_stopping_the_job_leaves_nothing(head: RayHead, deployment: tuple[str, Client]) -> None:
    running = deployment_processes()
    folders = folders_of(running)
    assert len(running) >= len(WORKERS) + 3 and len(folders) >= 4, (running, folders)
    head.stop("served")
    wait_for(lambda: not deployment_processes(), 10, lambda: f"left: {deployment_processes()}")
    kept = {folder for folder in folders if folder.exists()}
    assert all(folder.name.startswith("sluice-decode-0.dp0-") for folder in kept), "only logs of deaths may be kept"
    assert head.status("served") == "STOPPED"


@pytest.mark.parametrize("kind", ["readinessProbe", "livenessProbe"])
def test_a_node_without_a_proxy_answers_the_probes_of_the_manifests(head: RayHead, kind: str) -> None:
    """Field failure F5: workers were never ready, because their probe asked for a proxy that only some nodes have."""
    cluster = yaml.safe_load((REPOSITORY / "deploy/k8s/kuberay/cluster.yaml").read_text(encoding="utf-8"))
    with pytest.raises(httpx.ConnectError):
        httpx.get("http://127.0.0.1:8000/-/healthz")
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        asked = group["template"]["spec"]["containers"][0][kind]["httpGet"]
        assert httpx.get(f"http://127.0.0.1:{asked['port']}{asked['path']}", timeout=10).status_code == 200


def test_a_resource_that_no_node_has_is_named(head: RayHead) -> None:
    """Field failure F6: a wrong name of the accelerator's resource leaves workers unplaced, and nothing says why."""
    head.submit("nowhere", *options(ray__decode_resources="{Ascend910: 1}", runtime__startup_timeout_s=8))
    wait_for(lambda: head.status("nowhere") == "FAILED", 60, lambda: head.log("nowhere"))
    log = head.log("nowhere")
    assert "decode-0/dp0 (CPU 1, Ascend910 1) fit no node; no node has a resource Ascend910" in log
    assert "127.0.0.1" in log and "CPU 4" in log, "what the nodes have is shown"


def test_a_checkpoint_that_is_not_there_is_named(head: RayHead) -> None:
    head.submit("no-model", *options(model__path="/nowhere/model"))
    wait_for(lambda: head.status("no-model") == "FAILED", 60, lambda: head.log("no-model"))
    assert "/nowhere/model" in head.log("no-model") and "Traceback" not in head.log("no-model")
