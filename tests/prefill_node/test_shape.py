from __future__ import annotations

import pytest

from engine.config import build_config
from engine.model.config import ModelConfig
from prefill_node.geometry import CapacityError
from prefill_node.scheduler import INDEXER, MAIN
from prefill_node.shape import POOL, prefill_shape
from tests.checkpoints import tiny_config

MODEL = ModelConfig.from_dict(tiny_config("glm_moe_dsa"))
OBJECT_BYTES = 4 * (16 * (48 + 16 + 32) * 4 + 4)  # of each layer its rows and their checksum
STORED_BYTES = 28672


def shape(prefill=(), **sections):
    return prefill_shape(build_config({"model": {"path": "m"}, "prefill": dict(prefill), **sections}), MODEL)


def test_a_group_is_sized_from_configuration_and_model():
    sized = shape({"shared_buffers": 1, "max_requests": 4}, hostcann={"hbm_bytes": "1GiB"})
    assert sized.plan.slots == ((0,), (1, 2, 3))
    assert sized.kv_blocks == 4 * 5120 // 16
    assert sized.object_layout.object_bytes == OBJECT_BYTES
    assert sized.max_prompt_tokens == 5120
    assert sized.main_kv_bytes * 2 == sized.main_kv_bytes_all_resident
    assert sized.main_kv_bytes == 2 * sized.kv_blocks * 16 * (48 + 16) * 4


def test_without_checksums_objects_hold_nothing_but_rows():
    assert shape(pool={"checksum": "off"}).object_layout.object_bytes == OBJECT_BYTES - 4 * 4


def test_the_pool_counts_only_where_layers_are_reloaded_from_it():
    assert shape({"shared_buffers": 1}).cache_specs().keys() == {MAIN, INDEXER, POOL}
    assert shape({"shared_buffers": 3}).cache_specs().keys() == {MAIN, INDEXER}


def test_a_small_pool_lowers_the_longest_prompt():
    sized = shape({"shared_buffers": 1}, pool={"dram_bytes": 50 * STORED_BYTES})
    assert sized.pool_blocks == 42  # 85 % are given out
    assert sized.max_prompt_tokens == 42 * 16
    assert shape({"shared_buffers": 3}, pool={"dram_bytes": 50 * STORED_BYTES}).max_prompt_tokens == 5120


def test_a_pool_that_holds_nothing_is_refused():
    with pytest.raises(CapacityError, match=r"pool\.dram_bytes = 1000 cannot hold one block"):
        shape({"shared_buffers": 1}, pool={"dram_bytes": 1000})


def test_a_device_that_holds_nothing_is_refused():
    with pytest.raises(CapacityError, match=r"model\.max_model_len = 5120 .* hostcann\.hbm_bytes"):
        shape(hostcann={"hbm_bytes": "6MiB"})


def test_a_device_too_small_for_anything_has_nothing_free() -> None:
    with pytest.raises(CapacityError, match="but 0 are free"):
        shape(hostcann={"hbm_bytes": "1MiB"})
