"""A pool that is slow, too small, corrupted, or killed in the middle of a step: answers stay transformers'."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, Completion
from tests.e2e.conftest import BASE
from tests.e2e.test_equal_to_transformers import prompt_of
from tests.e2e.test_prefix_reuse import POOL_SERVICE
from tests.oracle import Oracle, assert_tokens_match

pytestmark = pytest.mark.cluster

PREFILL = "prefill-0/tp0"
NEW_TOKENS = 4
LENGTH, LONG = 600, 1500
MANY = range(300, 400, 10)
"""Lengths of prompts with nothing in common; their objects are twice as large as the pool."""


@pytest.fixture(scope="module")
def slow(checkpoints: dict[str, Path]) -> Iterator[Cluster]:
    """Two shared buffers, a small pool with checksums, and both pool and readers slower than the computation."""
    fields = BASE | {
        "prefill.shared_buffers": 2,
        "pool.dram_bytes": "4MiB",
        "pool.checksum": "on",
        "pool.timeout_s": 5.0,
        "faults.pool_delay_s": 0.02,
        "faults.read_delay_s": 0.01,
        "runtime.heartbeat_s": 0.2,
        "runtime.restart": "true",
    }
    with Cluster(checkpoints["glm_moe_dsa"], fields) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def oracle(oracles: dict[str, Oracle]) -> Oracle:
    return oracles["glm_moe_dsa"]


def ask(cluster: Cluster, oracle: Oracle, length: int) -> Completion:
    """One right answer."""
    answer = cluster.complete(prompt_of(length), NEW_TOKENS, ignore_eos=True)
    assert_tokens_match(answer.tokens, oracle.greedy(prompt_of(length), NEW_TOKENS))
    return answer


def cached(answer: Completion) -> int:
    tokens: int = answer.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_a_pool_too_small_for_all_prompts_evicts_and_answers_stay_right(slow: Cluster, oracle: Oracle) -> None:
    """Field failure C21: objects in use never leave the pool, cached ones make room, nothing is short of blocks."""
    for length in (*MANY, *MANY):
        ask(slow, oracle, length)
    slow.wait_idle()

    def evicted() -> bool:
        status = slow.worker(PREFILL).status
        return status.counters["pool_evictions"] > 0 and status.gauges["pool_cached_objects"] > 0

    slow.wait_for(evicted, 10, lambda: "nothing was evicted")
    gauges = slow.worker(PREFILL).status.gauges
    assert 0 < gauges["pool_cached_bytes"] <= gauges["pool_total_bytes"] == 4 << 20


def test_a_flipped_byte_in_the_pool_is_noticed_and_computed_again(slow: Cluster, oracle: Oracle) -> None:
    """One bit of every 512 bytes of the pool's memory, whatever is stored there."""
    ask(slow, oracle, LENGTH)
    assert cached(ask(slow, oracle, LENGTH)) == (LENGTH - 1) // 16 * 16
    slow.wait_idle()
    before = slow.worker(PREFILL).status.counters["wrong_checksums"]
    for memory in (slow.root / "pool").glob("memfabric_hybrid_*"):
        with memory.open("r+b") as file:
            content = bytearray(file.read())
            for position in range(100, len(content), 512):
                content[position] ^= 1
            file.seek(0)
            file.write(content)
    assert cached(ask(slow, oracle, LENGTH)) == 0
    slow.wait_for(
        lambda: slow.worker(PREFILL).status.counters["wrong_checksums"] > before, 10, lambda: "it was not noticed"
    )


def test_a_client_that_hangs_idle_is_replaced_before_a_request_meets_it(slow: Cluster, oracle: Oracle) -> None:
    ask(slow, oracle, LENGTH)
    slow.wait_idle()
    processes = slow.root / "processes"
    before = len(list(processes.iterdir()))
    client = slow.process_of("transfer.mem_pool_child")
    client.suspend()
    slow.wait_for(lambda: slow.worker(PREFILL).status.gauges["pool_up"] == 0, 15, lambda: "nobody notices")
    slow.wait_for(lambda: not client.is_running(), 5, lambda: "the client is not ended")
    slow.wait_for(lambda: slow.worker(PREFILL).status.gauges["pool_up"] == 1, 90, lambda: "the pool did not come back")
    ask(slow, oracle, LENGTH)
    assert cached(ask(slow, oracle, LENGTH)) > 0
    assert len(list(processes.iterdir())) == before, "the client that was ended has left something"


@pytest.mark.parametrize("hangs", [False, True])
def test_the_pools_service_killed_in_the_middle_of_a_step_costs_no_answer(
    slow: Cluster, oracle: Oracle, hangs: bool
) -> None:
    """SIGKILL while steps are saved and loaded; `sluice up` starts a new service.

    A call of MemCache's client that meets this may never return; stopping the client makes sure of that. It is then
    ended, and a new one joins the new service: the worker goes on, and has a pool again by itself.
    """
    answers: list[Completion] = []
    steps, worker = slow.worker(PREFILL).status.counters["steps"], slow.worker(PREFILL).info.epoch
    request = threading.Thread(target=lambda: answers.append(ask(slow, oracle, LONG + hangs)))
    request.start()

    def at_work() -> bool:
        status = slow.worker(PREFILL).status
        return status.counters["steps"] > steps + 1 and status.running > 0

    slow.wait_for(at_work, 30, lambda: "no step is under way")
    if hangs:
        slow.process_of("transfer.mem_pool_child").suspend()
    slow.process_of(POOL_SERVICE).kill()
    request.join(100)
    assert len(answers) == 1
    slow.wait_for(lambda: slow.worker(PREFILL).status.gauges["pool_up"] == 1, 60, lambda: "the pool did not come back")
    slow.wait_for(lambda: cached(ask(slow, oracle, LENGTH)) > 0, 60, lambda: "nothing is saved any more")
    assert slow.worker(PREFILL).info.epoch == worker, "the worker was started again"
    assert [memory.stat().st_size for memory in (slow.root / "pool").glob("memfabric_hybrid_*")] == [4 << 20]
