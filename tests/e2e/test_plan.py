"""A deployment with the settings `sluice plan` proposes holds the bytes it says, as the driver counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.checkpoint import checkpoint_of
from deploy.plan import Load, plan_deployment
from engine.config import load_config
from tests.cluster import CONFIG, Cluster
from tests.e2e.test_equal_to_transformers import prompt_of
from tests.oracle import assert_tokens_match
from tests.oracle_int8 import Int8Oracle

pytestmark = pytest.mark.cluster

LOAD = Load(context=2048, concurrency=3)
NEW_TOKENS = 8


def test_devices_hold_what_was_planned(checkpoints: dict[str, Path]) -> None:
    model_dir = checkpoints["glm_moe_dsa"]
    chosen = {"kv.indexer_dtype": "int8", "prefill.shared_buffers": 2, "prefill.max_tokens_per_step": 512}
    config = load_config(CONFIG, [f"{path}={value}" for path, value in chosen.items()] + [f"model.path={model_dir}"])
    plan = plan_deployment(config, checkpoint_of(config), LOAD)
    with Cluster(model_dir, chosen | plan.settings()) as cluster:
        prompts = [prompt_of(LOAD.context - NEW_TOKENS - extra) for extra in range(LOAD.concurrency)]
        answers = cluster.complete_all(prompts, NEW_TOKENS, ignore_eos=True)
        cluster.wait_idle()
        prefill, decode = cluster.worker("prefill-0/tp0"), cluster.worker("decode-0/dp0/tp0")
        held = {counted.device: counted.allocated_bytes for counted in cluster.counters()}
        assert held[prefill.info.device_id] == plan.prefill.device_bytes
        assert held[decode.info.device_id] == plan.decode.device_bytes
        gauges = decode.status.gauges
        assert gauges["host_pool_bytes"] == plan.decode.host_bytes
        assert gauges["indexer_bytes"] == plan.decode.indexer_bytes
        assert prefill.status.gauges["layer_buffers"] == plan.prefill.independent + plan.prefill.shared
        assert gauges["max_request_tokens"] == prefill.status.gauges["max_prompt_tokens"] == LOAD.context
    oracle = Int8Oracle(model_dir)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_tokens_match(answer.tokens, oracle.greedy(prompt, NEW_TOKENS))
