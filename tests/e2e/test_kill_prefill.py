"""kill -9 of a prefill worker during a transfer: the request ends with the cause, decode lives, everything is freed."""

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


def test_killed_prefill_worker_during_a_transfer(checkpoints: dict[str, Path]) -> None:
    fields = BASE | {"prefill.max_tokens_per_step": 64, "runtime.heartbeat_s": 0.2, "runtime.lost_after_s": 2.0}
    with Cluster(checkpoints["glm_moe_dsa"], fields) as cluster:
        cluster.complete(prompt_of(65), 2, ignore_eos=True)  # opens the links
        cluster.wait_idle()
        before = cluster.worker(DECODE).status.counters["bytes_pulled"]
        decode_pid = cluster.pid_of(DECODE)
        answers: list[httpx.Response] = []

        def ask() -> None:
            body = {"prompt": prompt_of(5000), "max_tokens": 8, "temperature": 0}
            answers.append(cluster.post("/v1/completions", body))

        request = threading.Thread(target=ask)
        request.start()
        cluster.wait_for(
            lambda: cluster.worker(DECODE).status.counters["bytes_pulled"] > before, 60, lambda: "nothing was pulled"
        )
        cluster.kill(PREFILL)
        request.join(60)
        assert not request.is_alive(), "the request did not end"
        assert answers[0].status_code == 503, answers[0].text
        assert PREFILL in answers[0].json()["error"]["message"]
        cluster.wait_idle()
        assert cluster.pid_of(DECODE) == decode_pid
        assert cluster.worker(DECODE).health == "ready"
