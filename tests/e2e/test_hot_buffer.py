"""The hot buffer is smaller than the context, and what it misses really comes from the host pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.e2e.conftest import BASE
from tests.e2e.test_equal_to_transformers import prompt_of
from tests.oracle import Oracle, assert_tokens_match

pytestmark = pytest.mark.cluster

DECODE = "decode-0/dp0/tp0"
HOT_TOKENS, CONTEXT, NEW_TOKENS = 64, 1500, 24
ROW_BYTES = (48 + 16) * 4  # latent and rope part of tests.checkpoints.tiny_config, float32
LAYERS = 4


def test_misses_are_fetched_from_host_memory(checkpoints: dict[str, Path], oracles: dict[str, Oracle]) -> None:
    with Cluster(checkpoints["deepseek_v32"], BASE | {"decode.hot_tokens": HOT_TOKENS}) as cluster:
        answer = cluster.complete(prompt_of(CONTEXT), NEW_TOKENS, ignore_eos=True)
        assert_tokens_match(answer.tokens, oracles["deepseek_v32"].greedy(prompt_of(CONTEXT), NEW_TOKENS))
        cluster.wait_idle()
        counters = cluster.worker(DECODE).status.counters
        # The first decode step finds an empty hot row: all its top-k rows must come from the host, in every layer.
        assert counters["hot_misses"] >= LAYERS * HOT_TOKENS
        assert counters["hot_hits"] > 0
        assert counters["bytes_host_to_device"] == counters["hot_misses"] * ROW_BYTES
        device = cluster.worker(DECODE).info.device_id
        counted = next(c for c in cluster.counters() if c.device == device)
        assert counted.copied_bytes["h2d"] >= counters["bytes_host_to_device"]


def test_zeroed_host_rows_change_the_answer(checkpoints: dict[str, Path], oracles: dict[str, Oracle]) -> None:
    fields = BASE | {"decode.hot_tokens": HOT_TOKENS, "faults.zero_host_rows": "spoiled"}
    with Cluster(checkpoints["deepseek_v32"], fields) as cluster:
        spoiled = cluster.generate(prompt_of(CONTEXT), NEW_TOKENS, request_id="spoiled-1")
        intact = cluster.generate(prompt_of(CONTEXT), NEW_TOKENS, request_id="intact-1")
    expected = oracles["deepseek_v32"].greedy(prompt_of(CONTEXT), NEW_TOKENS)
    assert_tokens_match(intact, expected)
    assert spoiled[0] == intact[0], "the first token comes from prefill and does not see the host pool"
    assert spoiled != intact
