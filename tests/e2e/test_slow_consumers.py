"""The proof of tests/prefill_node/test_slow_consumers.py over the real wheels: `faults` make readers and pool slow.

`--seeds N` asks N prompts of each deployment, four at a time, so that steps have chunks of several requests;
`make soak-prefill` asks many, with one, two and three shared buffers.
Without it only the second test runs: tests/e2e/test_pool_in_trouble.py has slow consumers, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cluster import Cluster
from tests.e2e.conftest import BASE
from tests.e2e.test_equal_to_transformers import prompt_of
from tests.oracle import Oracle, OracleResult, assert_tokens_match

pytestmark = pytest.mark.cluster

NEW_TOKENS, AT_A_TIME = 3, 4
LOST = ("reused slot", "ended the call while it was being written to")
"""Of a session that ends in the moment in which its first token is sent to it gRPC does not tell why."""
SLOW: dict[str, object] = BASE | {
    "prefill.max_tokens_per_step": 64,
    "pool.checksum": "on",
    "faults.read_delay_s": 0.01,
    "faults.pool_delay_s": 0.01,
    "runtime.max_reruns": 0,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seeds = metafunc.config.getoption("--seeds")
    metafunc.parametrize("seeds", [seeds])
    few = [1] if "without_the_gate" in metafunc.function.__name__ else []
    metafunc.parametrize("shared", [1, 2, 3] if seeds >= 20 else few)


def prompts(seeds: int) -> list[list[int]]:
    luck = random.Random(seeds)
    return [prompt_of(luck.randint(70, 250)) for _ in range(seeds)]


def answers(cluster: Cluster, seeds: int) -> Iterator[tuple[list[int], httpx.Response]]:
    """Each prompt, with what it was answered."""

    def ask(prompt: list[int]) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        return cluster.post("/v1/completions", body | {"return_token_ids": True})

    asked = prompts(seeds)
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        yield from zip(asked, threads.map(ask, asked), strict=True)


def assert_right(response: httpx.Response, expected: OracleResult) -> None:
    assert response.status_code == 200, response.text
    assert_tokens_match(response.json()["choices"][0]["token_ids"], expected)


def test_answers_are_right_however_slow_the_consumers(
    checkpoints: dict[str, Path], oracles: dict[str, Oracle], seeds: int, shared: int
) -> None:
    with Cluster(checkpoints["glm_moe_dsa"], SLOW | {"prefill.shared_buffers": shared}) as cluster:
        for prompt, response in answers(cluster, seeds):
            assert_right(response, oracles["glm_moe_dsa"].greedy(prompt, NEW_TOKENS))


def test_without_the_gate_requests_are_lost_but_none_is_answered_wrongly(
    checkpoints: dict[str, Path], oracles: dict[str, Oracle], seeds: int, shared: int
) -> None:
    lost = 0
    fields = SLOW | {"prefill.shared_buffers": shared, "faults.reuse_gate_off": "true"}
    with Cluster(checkpoints["glm_moe_dsa"], fields) as cluster:
        for prompt, response in answers(cluster, seeds):
            if response.status_code == 503:
                assert any(cause in response.text for cause in LOST), response.text
                lost += 1
            else:
                assert_right(response, oracles["glm_moe_dsa"].greedy(prompt, NEW_TOKENS))
    assert lost, "no reader was overtaken: the deployment proves nothing"
