"""More requests than decode has memory for: preempted ones resume, and every answer is the one it gets alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import drafting_checkpoint
from tests.cluster import Cluster
from tests.e2e.conftest import BASE
from tests.e2e.test_equal_to_transformers import prompt_of
from tests.oracle import Oracle, assert_tokens_match

pytestmark = pytest.mark.cluster

LENGTHS = [30, 47, 64, 81, 98, 115]
NEW_TOKENS = 150
BLOCK_LAYER_BYTES = 16 * (48 + 16) * 4  # 16 tokens of ckv and k_rope in float32


@pytest.mark.parametrize(("tp", "drafts"), [(1, 0), (2, 0), (1, 2)])
def test_preempted_requests_resume_with_the_same_tokens(tmp_path: Path, tp: int, drafts: int) -> None:
    """40 blocks for six requests that end with 75: all start, none could finish beside all the others."""
    checkpoint = drafting_checkpoint(tmp_path / "model", "glm_moe_dsa", seed=3)
    oracle, layers = Oracle(checkpoint), 4 + bool(drafts)
    fields = BASE | {
        "prefill.tp": tp,
        "decode.tp": tp,
        "decode.hot_tokens": (1 + drafts) * 64,
        "decode.speculative_tokens": drafts,
        "decode.host_pool_bytes": 40 * layers * BLOCK_LAYER_BYTES,
        "decode.headroom_tokens": 16,
    }
    with Cluster(checkpoint, fields) as cluster:
        pools = {pool.name: pool.total for pool in cluster.worker("decode-0/dp0/tp0").status.pools}
        assert pools["host_blocks"] == 40
        prompts = [prompt_of(length) for length in LENGTHS]
        answers = cluster.complete_all(prompts, NEW_TOKENS, ignore_eos=True)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_tokens_match(answer.tokens, oracle.greedy(prompt, NEW_TOKENS))
            assert answer.body["usage"]["prompt_tokens"] == len(prompt)
            assert answer.body["usage"]["completion_tokens"] == NEW_TOKENS
        counters = cluster.status().counters
        assert counters["reruns_preempted"] >= 1
        assert counters["reruns_lost"] == 0
        assert counters["requests_finished"] == len(LENGTHS)
