"""Greedy tokens of a whole deployment equal those of transformers on the same checkpoint, in float32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.e2e.conftest import BASE
from tests.oracle import Oracle, assert_tokens_match

pytestmark = pytest.mark.cluster

BLOCK, TOPK = 16, 64
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, TOPK - 1, TOPK, TOPK + 1, 255, 256, 257, 700]
NEW_TOKENS = 24
LONG, LONG_NEW_TOKENS = 3000, 8

Deployment = tuple[Cluster, Oracle, str]


@pytest.fixture(
    scope="module",
    params=[
        ("deepseek_v32", 1, 1),
        ("deepseek_v32", 2, 1),
        ("deepseek_v32", 2, 2),
        ("glm_moe_dsa", 1, 1),
        ("glm_moe_dsa", 2, 1),
        ("glm_moe_dsa", 2, 2),
        ("index_reuse", 2, 2),
    ],
    ids=lambda param: f"{param[0]}-p{param[1]}-d{param[2]}",
)
def deployment(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], oracles: dict[str, Oracle]
) -> Iterator[Deployment]:
    name, prefill_tp, decode_tp = request.param
    fields = BASE | {"prefill.tp": prefill_tp, "decode.tp": decode_tp, "decode.hot_tokens": TOPK}
    with Cluster(checkpoints[name], fields) as cluster:
        yield cluster, oracles[name], name


def prompt_of(length: int, vocabulary: int = 320) -> list[int]:
    """Random token ids, the same for a length in every run (so that the oracle's answers are reused)."""
    generator = random.Random(length)
    return [generator.randrange(2, vocabulary) for _ in range(length)]


def test_one_at_a_time(deployment: Deployment) -> None:
    cluster, oracle, _ = deployment
    for length in LENGTHS:
        answer = cluster.complete(prompt_of(length), NEW_TOKENS, ignore_eos=True)
        assert_tokens_match(answer.tokens, oracle.greedy(prompt_of(length), NEW_TOKENS))
        assert answer.finish_reason == "length"


def test_mixed_in_a_batch(deployment: Deployment) -> None:
    cluster, oracle, _ = deployment
    prompts = [prompt_of(length) for length in LENGTHS]
    for prompt, answer in zip(prompts, cluster.complete_all(prompts, NEW_TOKENS, ignore_eos=True), strict=True):
        assert_tokens_match(answer.tokens, oracle.greedy(prompt, NEW_TOKENS))


def test_several_thousand_tokens(deployment: Deployment) -> None:
    cluster, oracle, _ = deployment
    answer = cluster.complete(prompt_of(LONG), LONG_NEW_TOKENS, ignore_eos=True)
    assert_tokens_match(answer.tokens, oracle.greedy(prompt_of(LONG), LONG_NEW_TOKENS))
