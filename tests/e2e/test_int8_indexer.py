"""With int8 index keys a deployment answers as transformers does with the same quantiser, from less memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.passkey import make_prompt
from engine.model.config import ModelConfig
from tests.cluster import Cluster
from tests.e2e.conftest import BASE
from tests.e2e.test_equal_to_transformers import BLOCK, LENGTHS, TOPK, prompt_of
from tests.oracle import assert_tokens_match
from tests.oracle_int8 import Int8Oracle

pytestmark = pytest.mark.cluster

INT8 = BASE | {"kv.indexer_dtype": "int8"}
NEW_TOKENS = 24

Deployment = tuple[Cluster, Int8Oracle]


@pytest.fixture(
    scope="module",
    params=[("deepseek_v32", 1, 1), ("glm_moe_dsa", 2, 1), ("index_reuse", 2, 2)],
    ids=lambda param: f"{param[0]}-p{param[1]}-d{param[2]}",
)
def deployment(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Iterator[Deployment]:
    name, prefill_tp, decode_tp = request.param
    fields = INT8 | {"prefill.tp": prefill_tp, "decode.tp": decode_tp, "decode.hot_tokens": TOPK}
    with Cluster(checkpoints[name], fields) as cluster:
        yield cluster, Int8Oracle(checkpoints[name])


def test_equal_to_transformers_with_the_same_quantiser(deployment: Deployment) -> None:
    cluster, oracle = deployment
    prompts = [prompt_of(length) for length in LENGTHS]
    for prompt, answer in zip(prompts, cluster.complete_all(prompts, NEW_TOKENS, ignore_eos=True), strict=True):
        assert_tokens_match(answer.tokens, oracle.greedy(prompt, NEW_TOKENS))


@pytest.mark.parametrize(("dtype", "key_bytes", "tp"), [("float32", 4, 1), ("bfloat16", 2, 2)])
def test_pass_keys_are_found_with_index_keys_of_a_fraction_of_the_bytes(
    checkpoints: dict[str, Path], dtype: str, key_bytes: int, tp: int
) -> None:
    model = ModelConfig.from_dir(checkpoints["passkey"])
    questions = [make_prompt(1500, depth / 8, seed=depth) for depth in range(8)]
    with Cluster(checkpoints["passkey"], INT8 | {"model.dtype": dtype, "prefill.tp": tp, "decode.tp": tp}) as cluster:
        answers = cluster.complete_all([text for text, _ in questions], 20, stop=["\n"])
        assert [key in answer.text for (_, key), answer in zip(questions, answers, strict=True)] == [True] * 8
        status = cluster.worker("decode-0/dp0/tp0").status
    blocks = next(pool.total for pool in status.pools if pool.name == "indexer_blocks")
    rows = blocks * BLOCK * len(model.indexer_layers)
    assert status.gauges["indexer_bytes"] == rows * (model.index_head_dim + 2)
    share = status.gauges["indexer_bytes"] / (rows * model.index_head_dim * key_bytes)
    assert 1 / key_bytes < share < 1 / key_bytes + 0.05
