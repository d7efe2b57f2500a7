"""A configuration which does not fit the checkpoint is refused with field, value and what is legal."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import ConfigError, build_config
from engine.config_check import check_against_model, main_kv_block_bytes, max_model_len
from engine.model.config import ModelConfig
from tests.checkpoints import tiny_config

MODEL = ModelConfig.from_dict(tiny_config("glm_moe_dsa"))


def check(**sections: dict[str, Any]) -> None:
    check_against_model(build_config({"model": {"path": "m"}} | sections), MODEL)


def test_the_defaults_fit() -> None:
    check()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"path": "m", "max_model_len": 6000}}, r"model\.max_model_len = 6000: .* at most 5120"),
        ({"decode": {"hot_tokens": 48}}, r"decode\.hot_tokens = 48: .* 64 tokens .* use 64 or more"),
        ({"decode": {"host_pool_bytes": 1000}}, r"decode\.host_pool_bytes = 1000: .* takes 16384 bytes"),
        ({"prefill": {"tp": 3}}, r"prefill\.tp = 3: must divide 4 attention heads and 8 experts; legal: \[1, 2, 4\]"),
        ({"prefill": {"tp": 8}, "decode": {"tp": 8}}, r"(?s)prefill\.tp = 8.*\n.*decode\.tp = 8"),
        ({"prefill": {"independent_layers": [0, 4]}}, r"prefill\.independent_layers .*\[4\] are not layers.* 0 to 3"),
    ],
)
def test_what_does_not_fit_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(**sections)


def test_int8_index_keys_need_a_power_of_two_of_dims() -> None:
    config = build_config({"model": {"path": "m"}, "kv": {"indexer_dtype": "int8"}})
    check_against_model(config, MODEL)
    odd = ModelConfig.from_dict(tiny_config("glm_moe_dsa", index_head_dim=48))
    with pytest.raises(ConfigError, match=r"kv\.indexer_dtype = 'int8': .* has 48 \(index_head_dim\); use 'model'"):
        check_against_model(config, odd)


@pytest.mark.parametrize("packed", ["int8", "fp8", "packed"])
def test_a_packed_main_cache_is_refused(packed: str) -> None:
    with pytest.raises(ConfigError, match=f"kv.main_dtype = '{packed}': must be 'model'"):
        build_config({"model": {"path": "m"}, "kv": {"main_dtype": packed}})


def test_lengths_and_sizes() -> None:
    config = build_config({"model": {"path": "m", "dtype": "bfloat16"}})
    assert max_model_len(config, MODEL) == 5120
    assert main_kv_block_bytes(config, MODEL) == 4 * 16 * (48 + 16) * 2
