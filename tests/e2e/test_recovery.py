"""kill -9 of workers: their requests go on, token for token, on other groups or on the same one once it is back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.client import ClientError
from tests.cluster import Cluster
from tests.e2e.conftest import BASE
from tests.e2e.test_equal_to_transformers import prompt_of
from tests.oracle import Oracle, assert_tokens_match

pytestmark = pytest.mark.cluster

QUICK: dict[str, object] = BASE | {
    "prefill.max_tokens_per_step": 64,
    "runtime.heartbeat_s": 0.2,
    "runtime.lost_after_s": 3.0,
    "runtime.restart": "true",
}
LENGTH, NEW_TOKENS = 200, 300
LONG, LONG_NEW_TOKENS = 3000, 8
BURST = range(100, 340, 10)


class Asked:
    """One streamed request on a thread of its own."""

    def __init__(self, cluster: Cluster, length: int, max_tokens: int) -> None:
        self.tokens: list[int] = []
        self.failure: BaseException | None = None
        self._body = {
            "prompt": prompt_of(length),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        self._cluster = cluster
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def finish(self, timeout_s: float = 120.0) -> list[int]:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"no end within {timeout_s} s, after {len(self.tokens)} tokens"
        assert self.failure is None, f"{self.failure}\n{self._cluster.diagnosis()}"
        return self.tokens

    def failed(self) -> bool:
        """Waits for its end; whether it was a bad one."""
        self._thread.join(60)
        return self.failure is not None

    def _ask(self) -> None:
        try:
            for event in self._cluster.stream("/v1/completions", self._body):
                assert "error" not in event, event
                for choice in event["choices"]:
                    self.tokens += choice.get("token_ids") or []
        except BaseException as failure:
            self.failure = failure


def busy(cluster: Cluster, role: str, counter: str = "") -> str:
    """The leader of the group that works on something; not one that died at work in an earlier test."""
    for worker in cluster.status().workers:
        status = worker.status
        if (
            worker.health == "ready"
            and worker.info.worker_id.startswith(role)
            and (status.running or (counter and status.counters[counter]))
        ):
            return worker.info.worker_id
    return ""


def wait_busy(cluster: Cluster, role: str) -> str:
    cluster.wait_for(lambda: bool(busy(cluster, role)), 60, lambda: f"no {role} group is at work")
    return busy(cluster, role)


def all_ready(cluster: Cluster, workers: int) -> bool:
    return sum(worker.health == "ready" for worker in cluster.status().workers) == workers


def reruns(cluster: Cluster) -> float:
    return cluster.status().counters["reruns_lost"]


@pytest.fixture(scope="module")
def pairs(checkpoints: dict[str, Path]) -> Iterator[Cluster]:
    """Two prefill and two decode groups."""
    fields = QUICK | {"prefill.groups": 2, "decode.groups": 2}
    with Cluster(checkpoints["glm_moe_dsa"], fields, may_hang=True) as cluster:
        yield cluster


def test_a_stream_survives_its_decode_worker(pairs: Cluster, oracles: dict[str, Oracle]) -> None:
    before = reruns(pairs)
    request = Asked(pairs, LENGTH, NEW_TOKENS)
    pairs.wait_for(lambda: len(request.tokens) > 20, 60, lambda: "no tokens came")
    pairs.kill(wait_busy(pairs, "decode"))
    assert_tokens_match(request.finish(), oracles["glm_moe_dsa"].greedy(prompt_of(LENGTH), NEW_TOKENS))
    assert reruns(pairs) == before + 1
    pairs.wait_idle()


def test_a_prompt_survives_its_prefill_worker(pairs: Cluster, oracles: dict[str, Oracle]) -> None:
    before = reruns(pairs)
    request = Asked(pairs, LONG, LONG_NEW_TOKENS)
    pairs.kill(wait_busy(pairs, "prefill"))
    assert_tokens_match(request.finish(), oracles["glm_moe_dsa"].greedy(prompt_of(LONG), LONG_NEW_TOKENS))
    assert reruns(pairs) >= before + 1
    pairs.wait_idle()


def test_a_stopped_decode_worker_is_passed_over(pairs: Cluster, oracles: dict[str, Oracle]) -> None:
    """SIGSTOP: its connections stay, only its heartbeats end. When it goes on, nothing of the request is left on it."""
    request = Asked(pairs, LENGTH, NEW_TOKENS)
    pairs.wait_for(lambda: len(request.tokens) > 20, 60, lambda: "no tokens came")
    stopped = pairs.pid_of(wait_busy(pairs, "decode"))
    os.kill(stopped, signal.SIGSTOP)
    try:
        tokens = request.finish()
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert_tokens_match(tokens, oracles["glm_moe_dsa"].greedy(prompt_of(LENGTH), NEW_TOKENS))
    pairs.wait_for(lambda: all_ready(pairs, 4), 30, lambda: "the stopped worker did not come back")
    pairs.wait_idle()


def test_one_death_in_a_burst_takes_nobody_along(pairs: Cluster, oracles: dict[str, Oracle]) -> None:
    """Field failure B34. Every answer is right, and all other processes are the same as before."""
    pairs.wait_for(lambda: all_ready(pairs, 4), 60, lambda: "a group of an earlier test has not come back")
    pids = {worker.info.worker_id: worker.info.pid for worker in pairs.status().workers}
    requests = [Asked(pairs, length, 40) for length in BURST]
    pairs.wait_for(lambda: any(request.tokens for request in requests), 60, lambda: "no tokens came")
    victim = wait_busy(pairs, "decode")
    pairs.kill(victim)
    for length, request in zip(BURST, requests, strict=True):
        assert_tokens_match(request.finish(), oracles["glm_moe_dsa"].greedy(prompt_of(length), 40))
    pairs.wait_for(lambda: all_ready(pairs, 4), 60, lambda: f"{victim} did not come back")
    assert {name for name, pid in pids.items() if pairs.pid_of(name) != pid} == {victim}
    pairs.wait_idle()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_dead_worker_group_is_started_again_and_nobody_else(
    checkpoints: dict[str, Path], oracles: dict[str, Oracle], tp: int
) -> None:
    """With nobody to take over, the stream waits for the group to come back. The highest rank is killed."""
    fields = QUICK | {"prefill.tp": tp, "decode.tp": tp}
    with Cluster(checkpoints["glm_moe_dsa"], fields) as cluster:
        pids = {worker.info.worker_id: worker.info.pid for worker in cluster.status().workers}
        request = Asked(cluster, LENGTH, NEW_TOKENS)
        cluster.wait_for(lambda: len(request.tokens) > 20, 60, lambda: "no tokens came")
        os.kill(pids[f"decode-0/dp0/tp{tp - 1}"], signal.SIGKILL)
        assert_tokens_match(request.finish(), oracles["glm_moe_dsa"].greedy(prompt_of(LENGTH), NEW_TOKENS))
        cluster.wait_idle()
        for name, pid in pids.items():
            assert (cluster.pid_of(name) == pid) == name.startswith("prefill"), name


def test_a_prefill_group_that_comes_back_finishes_the_prompt(
    checkpoints: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    """The only one; it rejoins the pool. Then the pool's service and the meta server die, and come back too."""
    with Cluster(checkpoints["glm_moe_dsa"], QUICK, may_hang=True) as cluster:
        decode = cluster.pid_of("decode-0/dp0/tp0")
        request = Asked(cluster, LONG, LONG_NEW_TOKENS)
        cluster.kill(wait_busy(cluster, "prefill"))
        expected = oracles["glm_moe_dsa"].greedy(prompt_of(LONG), LONG_NEW_TOKENS)
        assert_tokens_match(request.finish(), expected)
        cluster.wait_idle()

        prefill = cluster.pid_of("prefill-0/tp0")
        cluster.process_of("transfer.mem_pool_service").kill()
        cluster.wait_for(lambda: cluster.said("starting memcache-meta again"), 20, lambda: "no pool service")
        other = oracles["glm_moe_dsa"].greedy(prompt_of(700), LONG_NEW_TOKENS)
        assert_tokens_match(cluster.complete(prompt_of(700), LONG_NEW_TOKENS, ignore_eos=True).tokens, other)
        cluster.wait_idle()

        request = Asked(cluster, LENGTH, NEW_TOKENS)
        cluster.wait_for(lambda: len(request.tokens) > 20, 60, lambda: "no tokens came")
        cluster.process_of("meta_server.main").kill()
        assert request.failed(), "its connection went with the meta server"
        cluster.wait_for(lambda: is_ready(cluster), 30, lambda: "the workers did not register again")
        assert cluster.pid_of("decode-0/dp0/tp0") == decode, "nobody else was restarted"
        assert cluster.pid_of("prefill-0/tp0") == prefill
        cluster.wait_idle()
        assert_tokens_match(cluster.complete(prompt_of(LONG), LONG_NEW_TOKENS, ignore_eos=True).tokens, expected)


def is_ready(cluster: Cluster) -> bool:
    try:
        return cluster.status().ready
    except ClientError:
        return False
