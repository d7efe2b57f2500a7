"""Prompts that begin alike share their rows through the pool; answers stay transformers', with the pool and without."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cluster import Cluster
from tests.e2e.conftest import BASE
from tests.e2e.test_equal_to_transformers import prompt_of
from tests.oracle import Oracle, assert_tokens_match

pytestmark = pytest.mark.cluster

POOL_SERVICE = "transfer.mem_pool_service"


def ask(cluster: Cluster, oracle: Oracle, prompt: list[int]) -> int:
    """Checks one answer against transformers'; its cached tokens."""
    answer = cluster.complete(prompt, 8, ignore_eos=True)
    assert_tokens_match(answer.tokens, oracle.greedy(prompt, 8))
    cached: int = answer.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


@pytest.mark.parametrize(
    "fields", [{}, {"prefill.independent_layers": "all"}, {"prefill.tp": 2}, {"pool.checksum": "on"}], ids=str
)
def test_answers_with_cached_prefixes_equal_transformers(
    checkpoints: dict[str, Path], oracles: dict[str, Oracle], fields: dict[str, object]
) -> None:
    oracle, prompt = oracles["glm_moe_dsa"], prompt_of(600)
    with Cluster(checkpoints["glm_moe_dsa"], BASE | fields) as cluster:
        assert ask(cluster, oracle, prompt) == 0
        assert ask(cluster, oracle, prompt) == 592
        assert ask(cluster, oracle, prompt[:400] + prompt_of(150)) == 400
        assert ask(cluster, oracle, prompt[:15]) == 0
        cluster.wait_idle()
        for answer in cluster.complete_all([prompt[:300]] * 3, 8, ignore_eos=True):
            assert_tokens_match(answer.tokens, oracle.greedy(prompt[:300], 8))


@contextmanager
def restarted(command: list[str], environment: dict[str, str], folder: str) -> Iterator[None]:
    """The pool's service again, at the same addresses."""
    process = subprocess.Popen(command, env=environment, cwd=folder)
    try:
        yield
    finally:
        process.kill()
        process.wait(10)


def test_prefill_goes_on_without_its_pool_and_takes_it_back(
    checkpoints: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    oracle = oracles["glm_moe_dsa"]
    with Cluster(checkpoints["glm_moe_dsa"], BASE) as cluster:

        def pool_up() -> bool:
            return cluster.worker("prefill-0/tp0").status.gauges["pool_up"] == 1

        assert ask(cluster, oracle, prompt_of(600)) == 0
        service: psutil.Process = cluster.process_of(POOL_SERVICE)
        command, environment, folder = service.cmdline(), service.environ(), service.cwd()
        service.kill()
        for length in (600, 300):
            assert ask(cluster, oracle, prompt_of(length)) == 0
        cluster.wait_for(lambda: not pool_up(), 10, lambda: "prefill has not noticed that its pool is down")
        assert "without the pool" in cluster.worker("prefill-0/tp0").status.detail
        with restarted(command, environment, folder):

            def reused() -> bool:
                return ask(cluster, oracle, prompt_of(500)) == 496

            cluster.wait_for(reused, 30, lambda: "the pool is not used again")
            cluster.wait_for(pool_up, 10, lambda: "the pool is not said to be up again")
            cluster.wait_idle()
            cluster.stop()
