"""Prefill holds I + min(B, N - I) layer buffers whatever the model's depth, and answers do not depend on B."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.e2e.conftest import BASE
from tests.e2e.test_equal_to_transformers import prompt_of
from tests.oracle import Oracle, assert_tokens_match

pytestmark = pytest.mark.cluster

LAYERS, KV_BLOCKS, BLOCK = 4, 1024, 16
ROW_BYTES = (48 + 16 + 32) * 4  # latent, rope part and indexer key of tests.checkpoints.tiny_config, float32
LAYER_BUFFER_BYTES = KV_BLOCKS * BLOCK * ROW_BYTES
PROMPTS = [prompt_of(length) for length in (17, 257, 700)]


def measure(model: Path, oracle: Oracle, shared: int, independent: str) -> tuple[int, float]:
    """Device bytes of the prefill worker as the driver counts them, and the buffers it says it has."""
    fields = {"prefill.shared_buffers": shared, "prefill.independent_layers": independent}
    with Cluster(model, BASE | fields | {"prefill.kv_blocks": KV_BLOCKS}) as cluster:
        for prompt, answer in zip(PROMPTS, cluster.complete_all(PROMPTS, 12, ignore_eos=True), strict=True):
            assert_tokens_match(answer.tokens, oracle.greedy(prompt, 12))
        device = cluster.worker("prefill-0/tp0").info.device_id
        counted = next(c for c in cluster.counters() if c.device == device)
        return counted.allocated_bytes, cluster.worker("prefill-0/tp0").status.gauges["layer_buffers"]


def test_device_holds_independent_plus_shared_buffers(checkpoints: dict[str, Path], oracles: dict[str, Oracle]) -> None:
    model, oracle = checkpoints["glm_moe_dsa"], oracles["glm_moe_dsa"]
    measured = {(1, shared): measure(model, oracle, shared, "[0]") for shared in (1, 2, 3)} | {
        (0, 1): measure(model, oracle, 1, "[]")
    }
    least = measured[0, 1][0] - LAYER_BUFFER_BYTES  # everything on the device that is not a layer buffer
    assert 0 <= least < LAYER_BUFFER_BYTES
    for (independent, shared), (device_bytes, buffers) in measured.items():
        expected = independent + min(shared, LAYERS - independent)
        assert buffers == expected
        assert device_bytes - least == expected * LAYER_BUFFER_BYTES
