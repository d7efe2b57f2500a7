"""kill -9 of a decode worker during a transfer: the request ends with the cause, prefill lives, everything is freed."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from tests.cluster import Cluster
from tests.e2e.conftest import BASE
from tests.e2e.test_equal_to_transformers import prompt_of

pytestmark = pytest.mark.cluster

DECODE, PREFILL = "decode-0/dp0/tp0", "prefill-0/tp0"


def pulled(cluster: Cluster) -> float:
    return cluster.worker(DECODE).status.counters["bytes_pulled"]


def test_killed_decode_worker_during_a_transfer(checkpoints: dict[str, Path]) -> None:
    fields = BASE | {"prefill.max_tokens_per_step": 64, "runtime.heartbeat_s": 0.2, "runtime.lost_after_s": 2.0}
    with Cluster(checkpoints["glm_moe_dsa"], fields) as cluster:
        cluster.complete(prompt_of(65), 2, ignore_eos=True)  # opens the links
        cluster.wait_idle()
        before, prefill_pid = pulled(cluster), cluster.pid_of(PREFILL)
        answers: list[httpx.Response] = []

        def ask() -> None:
            body = {"prompt": prompt_of(5000), "max_tokens": 8, "temperature": 0}
            answers.append(cluster.post("/v1/completions", body))

        request = threading.Thread(target=ask)
        request.start()
        cluster.wait_for(lambda: pulled(cluster) > before, 60, lambda: "decode pulled nothing")
        cluster.kill(DECODE)
        request.join(60)
        assert not request.is_alive(), "the request did not end"

        assert answers[0].status_code == 503, answers[0].text
        assert DECODE in answers[0].json()["error"]["message"]
        cluster.wait_idle()
        assert cluster.pid_of(PREFILL) == prefill_pid
        assert cluster.worker(PREFILL).health == "ready"
        cluster.wait_for(lambda: cluster.worker(DECODE).health == "lost", 10, lambda: "decode is not reported lost")
        cluster.wait_for(lambda: cluster.said("killed by SIGKILL"), 10, lambda: "the launcher tells of no death")
        assert cluster.said(f"{DECODE} (pid ")

        refused = cluster.post("/v1/completions", {"prompt": [5], "max_tokens": 1})
        assert refused.status_code == 503 and "decode" in refused.json()["error"]["message"]
