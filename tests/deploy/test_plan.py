"""`sluice plan`: the numbers of the full-size models, and what it says where a load does not fit."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.checkpoint import checkpoint_of, default_config
from deploy.plan import Load, Plan, parse_tokens, plan_deployment, with_setting
from deploy.plan_fit import other_problems, shortfalls
from engine.config import ConfigError, SluiceConfig, build_config
from engine.model.config import ModelConfig
from tests.checkpoints import tiny_config
from tests.cluster import REPOSITORY

FULL_SIZE = Path(__file__).resolve().parent.parent / "full_size"
GIB, MIB = 1 << 30, 1 << 20
BLOCK, HOT = 128, 4096
LAYERS = {"deepseek-v3.2": (61, 61), "glm-5": (78, 78), "glm-5.2": (78, 21)}  # all, with an indexer
MAIN_ROW, KEY_ROW, INT8_ROW = (512 + 64) * 2, 128 * 2, 128 + 2  # bytes of one token in one layer, bfloat16
LOAD = Load(1 << 20, 9)


def configured(name: str, *overrides: str) -> tuple[SluiceConfig, ModelConfig]:
    sizes = [f"kv.block_size={BLOCK}", f"decode.hot_tokens={HOT}", *overrides]
    config = default_config(FULL_SIZE / name, sizes)
    return config, checkpoint_of(config)


def planned(name: str, *overrides: str, load: Load = LOAD) -> Plan:
    return plan_deployment(*configured(name, *overrides), load)


@pytest.mark.parametrize("name", LAYERS)
def test_what_nine_requests_of_a_million_tokens_need(name: str) -> None:
    layers, indexers = LAYERS[name]
    plan = planned(name, "prefill.shared_buffers=3")
    tokens = LOAD.context * LOAD.concurrency
    assert plan.config.model.dtype == "bfloat16"
    assert (plan.prefill.independent, plan.prefill.shared) == (1, 3)
    assert plan.prefill.footprint == 4 / layers
    assert plan.decode.host_bytes == tokens * layers * MAIN_ROW
    assert plan.decode.indexer_bytes == plan.decode.indexer_bytes_model == tokens * indexers * KEY_ROW
    assert plan.decode.indexer_bytes_int8 == tokens * indexers * INT8_ROW
    assert plan.decode.hot_bytes_per_request == (HOT + BLOCK) * layers * MAIN_ROW
    # Full-size tensors are whole MiB but not whole 2 MiB pages: each of a device's tensors may be rounded up.
    device = 9 * plan.decode.hot_bytes_per_request + plan.decode.indexer_bytes
    assert device <= plan.decode.device_bytes < device + (2 * layers + indexers) * 2 * MIB
    assert plan.decode.device_bytes_all_resident == plan.decode.host_bytes + plan.decode.indexer_bytes


def test_prefill_devices_hold_one_prompt_in_all_layer_buffers() -> None:
    plan = planned("glm-5", "prefill.shared_buffers=3")
    buffer = LOAD.context * (MAIN_ROW + KEY_ROW)
    # And pages of 2 MiB: one with the generation words, the others with a checksum of 4 bytes per block and buffer.
    assert plan.prefill.device_bytes == 4 * buffer + (1 + 1) * 2 * MIB
    assert plan.prefill.device_bytes_all_resident == 78 * buffer + (1 + 2) * 2 * MIB
    assert plan.prefill.pool_bytes >= 78 * buffer / 0.85


def test_nothing_is_reloaded_with_a_buffer_for_every_layer() -> None:
    plan = planned("glm-5", "prefill.independent_layers=all")
    assert plan.prefill.footprint == 1.0
    assert plan.prefill.pool_bytes == 0


def test_int8_index_keys_take_half_the_bytes_of_bfloat16() -> None:
    plain, int8 = planned("glm-5"), planned("glm-5", "kv.indexer_dtype=int8")
    assert int8.decode.indexer_bytes == plain.decode.indexer_bytes_int8
    assert int8.decode.indexer_bytes / plain.decode.indexer_bytes == INT8_ROW / KEY_ROW
    assert int8.decode.host_bytes == plain.decode.host_bytes


def test_at_the_break_even_context_a_hot_row_is_as_large_as_the_main_kv() -> None:
    at = planned("glm-5").decode.break_even_context
    assert at == HOT + BLOCK
    for context, smaller in ((at - BLOCK, False), (at, False), (at + BLOCK, True)):
        decode = planned("glm-5", load=Load(context, 1)).decode
        assert (decode.hot_bytes_per_request < decode.host_bytes) == smaller


def test_drafting_adds_a_layer_with_an_indexer_and_needs_more_hot_tokens() -> None:
    plan = planned("glm-5.2", "decode.speculative_tokens=3")
    tokens = LOAD.context * LOAD.concurrency
    assert plan.prefill.layers == 79
    assert plan.decode.host_bytes == tokens * 79 * MAIN_ROW
    assert plan.decode.indexer_bytes == tokens * 22 * KEY_ROW
    assert plan.decode.hot_tokens == 4 * 2048


def test_requests_are_spread_over_the_dp_ranks_of_all_groups() -> None:
    plan = planned("glm-5", "decode.groups=2", "decode.dp=2")
    assert plan.decode.requests == math.ceil(9 / 4)
    assert plan.decode.host_bytes == 3 * LOAD.context * 78 * MAIN_ROW


def test_each_field_without_room_is_named_with_what_it_should_be() -> None:
    small = ["decode.max_requests=2", "prefill.kv_blocks=10", "model.max_model_len=1000", "hostcann.hbm_bytes=1GiB"]
    config, model = configured("glm-5.2", "decode.hot_tokens=1024", *small)
    plan = plan_deployment(config, model, LOAD)
    named = {(short.field, short.configured, short.needed) for short in shortfalls(config, model, plan)}
    assert named == {
        ("model.max_model_len", 1000, 1 << 20),
        ("prefill.kv_blocks", 10, 8192),
        ("pool.dram_bytes", 256 * MIB, plan.prefill.pool_bytes),
        ("decode.hot_tokens", 1024, 2048),
        ("decode.max_requests", 2, 9),
        ("decode.host_pool_bytes", 256 * MIB, plan.decode.host_bytes),
        ("hostcann.hbm_bytes", GIB, plan.prefill.device_bytes),
        ("hostcann.hbm_bytes", GIB, plan.decode.device_bytes),
    }


@pytest.mark.parametrize("name", LAYERS)
def test_the_proposed_settings_fit_exactly(name: str) -> None:
    config, model = configured(name)
    load = Load(128 << 10, 4)
    plan = plan_deployment(config, model, load)
    proposed = [f"{path}={value}" for path, value in plan.settings().items()]
    enough = configured(name, *proposed)[0]
    assert shortfalls(enough, model, plan_deployment(enough, model, load)) == ()
    assert other_problems(model, plan) == ""
    for path in ("hostcann.hbm_bytes", "decode.host_pool_bytes", "pool.dram_bytes"):
        less = with_setting(enough, path, plan.settings()[path] - 1)
        assert [short.field for short in shortfalls(less, model, plan_deployment(less, model, load))] == [path]


def test_remedies_of_a_full_device_are_what_they_say() -> None:
    config, model = configured("glm-5", "hostcann.hbm_bytes=64GiB", "prefill.shared_buffers=60")
    plan = plan_deployment(config, model, LOAD)
    of_prefill, of_decode = (
        short.remedies for short in shortfalls(config, model, plan) if short.field == "hostcann.hbm_bytes"
    )
    assert {remedy.setting.partition("=")[0] for remedy in of_prefill} == {
        "kv.indexer_dtype",
        "prefill.shared_buffers",
        "prefill.independent_layers",
    }
    assert [(remedy.setting, remedy.fits) for remedy in of_decode] == [
        ("kv.indexer_dtype=int8", False),
        ("decode.hot_tokens=2048", False),
        ("decode.dp=3", True),
    ]
    for remedy in of_decode:
        tried = planned("glm-5", "hostcann.hbm_bytes=64GiB", remedy.setting)
        assert tried.decode.device_bytes == remedy.device_bytes
        assert remedy.fits == (remedy.device_bytes <= 64 * GIB)


def test_a_context_beyond_the_checkpoint_is_said() -> None:
    config, model = configured("deepseek-v3.2")
    said = other_problems(model, plan_deployment(config, model, LOAD))
    assert said == "model.max_model_len = 1048576: the checkpoint supports at most 163840 (max_position_embeddings)"


def test_keys_that_cannot_be_int8_are_not_planned_so() -> None:
    model = ModelConfig.from_dict(tiny_config("glm_moe_dsa", index_head_dim=48))
    plan = plan_deployment(build_config({"model": {"path": "m"}}), model, Load(1000, 1))
    assert plan.decode.indexer_bytes_int8 is None


def test_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"prefill\.independent_layers: the model has no layer 61"):
        planned("deepseek-v3.2", "prefill.independent_layers=[61]")


@pytest.mark.parametrize(("text", "tokens"), [("1M", 1 << 20), ("128k", 128 << 10), ("1.5K", 1536), ("77", 77)])
def test_token_counts(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "1G", "1 000", "K"])
def test_what_is_no_token_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write one like 4096, 128K or 1M"):
        parse_tokens(text)


def sluice_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)


def settings_line_of(answer: dict[str, Any]) -> str:
    return " ".join(f"--set {path}={value}" for path, value in answer["settings"].items())


def test_the_command_says_what_to_change_and_ends_with_1() -> None:
    arguments = ("--model", str(FULL_SIZE / "glm-5.2"), "--context", "1M", "--concurrency", "9")
    sizes = ("--set", "hostcann.hbm_bytes=64GiB", "--set", "kv.block_size=128", "--set", "kv.indexer_dtype=int8")
    result = sluice_plan(*arguments, *sizes)
    assert result.returncode == 1, result.stderr
    for text in (
        "9 requests of 1,048,576 tokens",
        "3 of 78",
        "3.8%",
        "24.0 GiB",
        "raise it to 789.8 GiB",
        "2176 tokens",
    ):
        assert text in result.stdout
    answer: dict[str, Any] = json.loads(sluice_plan(*arguments, *sizes, "--json").stdout)
    assert not answer["fits"]
    assert "  " + settings_line_of(answer) in result.stdout.splitlines(), "one line, to be copied"
    settings = [part for path, value in answer["settings"].items() for part in ("--set", f"{path}={value}")]
    fitting = sluice_plan(*arguments, *sizes, *settings, "--json")
    assert fitting.returncode == 0 and json.loads(fitting.stdout)["fits"]


def test_no_settings_are_proposed_that_the_start_would_refuse() -> None:
    arguments = ("--model", str(FULL_SIZE / "glm-5.2"), "--context", "2M")
    result = sluice_plan(*arguments)
    assert result.returncode == 1 and "the checkpoint supports at most" in result.stdout
    assert "exactly enough" not in result.stdout and "--set" not in result.stdout
    assert json.loads(sluice_plan(*arguments, "--json").stdout)["settings"] is None


def test_planning_needs_no_torch() -> None:
    code = "import sys, deploy.plan_view, deploy.plan_fit, deploy.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd=REPOSITORY).returncode == 0
