"""A whole deployment that drafts tokens answers like transformers, and like one that does not draft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import YARN, drafting_checkpoint
from tests.cluster import Cluster
from tests.e2e.conftest import BASE
from tests.e2e.test_equal_to_transformers import prompt_of
from tests.oracle import Oracle, assert_tokens_match

pytestmark = pytest.mark.cluster

BLOCK, TOPK, NEW_TOKENS = 16, 64, 24
LENGTHS = [1, *(k * BLOCK + around for k in (1, 4, 16) for around in (-1, 0, 1)), 700]
"""Around whole blocks, below and above index_topk, and prompts of one and of several chunks."""
SAMPLED = {"temperature": 0.7, "top_p": 0.95, "seed": 7, "ignore_eos": True}

Deployment = tuple[Cluster, Oracle]


@pytest.fixture(
    scope="module",
    params=[("deepseek_v32", 1, 1, 1), ("glm_moe_dsa", 2, 2, 3), ("deepseek_v32", 2, 1, 2)],
    ids=lambda param: f"{param[0]}-p{param[1]}-d{param[2]}-mtp{param[3]}",
)
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    family, prefill_tp, decode_tp, drafts = request.param
    rope = {"rope_parameters": YARN} if family == "deepseek_v32" else {}
    checkpoint = drafting_checkpoint(tmp_path_factory.mktemp("drafting") / family, family, seed=3, **rope)
    fields = BASE | {
        "prefill.tp": prefill_tp,
        "decode.tp": decode_tp,
        "decode.speculative_tokens": drafts,
        "decode.hot_tokens": (1 + drafts) * TOPK,
    }
    with Cluster(checkpoint, fields) as cluster:
        yield cluster, Oracle(checkpoint)


def test_greedy_answers_equal_transformers(deployment: Deployment) -> None:
    cluster, oracle = deployment
    prompts = [prompt_of(length) for length in LENGTHS]
    for prompt, answer in zip(prompts, cluster.complete_all(prompts, NEW_TOKENS, ignore_eos=True), strict=True):
        assert_tokens_match(answer.tokens, oracle.greedy(prompt, NEW_TOKENS))
        assert answer.finish_reason == "length"
    cluster.wait_idle()
    status = cluster.worker("decode-0/dp0/tp0").status
    assert 0 < status.counters["accepted_tokens"] < status.counters["draft_tokens"]
    assert 0 < status.gauges["acceptance_rate"] < 1
    assert 'sluice_worker_total{name="accepted_tokens",worker="decode-0/dp0/tp0"}' in cluster.get("/metrics").text


def test_prompts_that_begin_alike(deployment: Deployment) -> None:
    """One after the other, so that blocks kept of one prompt could serve the next, whatever follows them there."""
    cluster, oracle = deployment
    whole = prompt_of(700)
    for prompt in (whole[:201], whole, whole, whole[:455], [*whole[:320], *prompt_of(50)]):
        answer = cluster.complete(prompt, NEW_TOKENS, ignore_eos=True)
        assert_tokens_match(answer.tokens, oracle.greedy(prompt, NEW_TOKENS))


def test_sampled_answers_are_those_of_a_deployment_that_does_not_draft(tmp_path: Path) -> None:
    """Seeded, with int8 index keys, index reuse, every layer in one of three buffers or in its own, and one of the two
    selecting by LIM."""
    kinds = ["full", "shared", "full", "shared"]
    checkpoint = drafting_checkpoint(tmp_path / "m", "glm_moe_dsa", seed=6, indexer_types=kinds)
    prompts, answers = [prompt_of(length) for length in (31, 32, 33, 300)], {}
    for drafts in (0, 2):
        fields = BASE | {
            "kv.indexer_dtype": "int8",
            "decode.speculative_tokens": drafts,
            "decode.selection": "lim" if drafts else "residency",
            "decode.hot_tokens": 3 * TOPK,
            "prefill.independent_layers": [0, -1],
            "prefill.shared_buffers": 1,
        }
        with Cluster(checkpoint, fields) as cluster:
            answers[drafts] = [answer.tokens for answer in cluster.complete_all(prompts, NEW_TOKENS, **SAMPLED)]
            cluster.wait_idle()
            accepted = cluster.worker("decode-0/dp0/tp0").status.counters["accepted_tokens"]
    assert accepted > 0
    assert answers[2] == answers[0]
