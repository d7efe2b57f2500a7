"""A deployment with the settings `sluice plan` proposes holds the bytes it says, as the driver counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from sluice.v1 import common_pb2

from deploy.checkpoint import checkpoint_of
from deploy.plan import Load, plan_deployment
from engine.config import load_config
from tests.checkpoints import drafting_checkpoint
from tests.cluster import CONFIG, Cluster
from tests.e2e.test_equal_to_transformers import prompt_of
from tests.oracle import Oracle, assert_tokens_match
from tests.oracle_int8 import Int8Oracle

pytestmark = pytest.mark.cluster

LOAD = Load(context=2048, concurrency=3)
NEW_TOKENS = 8
CHUNKS = {"prefill.max_tokens_per_step": 512}


@pytest.mark.parametrize(
    "chosen",
    [
        {"kv.indexer_dtype": "int8", "prefill.shared_buffers": 2},
        {"decode.dp": 2, "prefill.tp": 2, "decode.tp": 2},
        {"prefill.independent_layers": "all", "kv.block_size": 32},
        {"decode.speculative_tokens": 2},
    ],
    ids=["int8", "dp2-tp2", "all-independent", "drafting"],
)
def test_devices_hold_what_was_planned(checkpoints: dict[str, Path], tmp_path: Path, chosen: dict[str, object]) -> None:
    model_dir, fields = checkpoints["glm_moe_dsa"], CHUNKS | chosen
    if "decode.speculative_tokens" in chosen:
        model_dir = drafting_checkpoint(tmp_path / "drafting", "glm_moe_dsa", seed=3)
    config = load_config(CONFIG, [f"{path}={value}" for path, value in fields.items()] + [f"model.path={model_dir}"])
    plan = plan_deployment(config, checkpoint_of(config), LOAD)
    prompts = [prompt_of(LOAD.context - NEW_TOKENS - extra) for extra in range(LOAD.concurrency)]
    with Cluster(model_dir, fields | plan.settings()) as cluster:
        answers = cluster.complete_all(prompts, NEW_TOKENS, ignore_eos=True)
        cluster.wait_idle()
        held = {counted.device: counted.allocated_bytes for counted in cluster.counters()}
        for worker in cluster.status().workers:
            gauges, device_bytes = worker.status.gauges, held[worker.info.device_id]
            if worker.info.role == common_pb2.WORKER_ROLE_PREFILL:
                assert device_bytes == plan.prefill.device_bytes
                assert gauges["layer_buffers"] == plan.prefill.independent + plan.prefill.shared
                assert gauges["max_prompt_tokens"] == LOAD.context
            else:
                assert device_bytes == plan.decode.device_bytes
                assert gauges["host_pool_bytes"] == plan.decode.host_bytes
                assert gauges["indexer_bytes"] == plan.decode.indexer_bytes
                assert gauges["max_request_tokens"] == LOAD.context
    oracle = (Int8Oracle if "kv.indexer_dtype" in chosen else Oracle)(model_dir)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_tokens_match(answer.tokens, oracle.greedy(prompt, NEW_TOKENS))
