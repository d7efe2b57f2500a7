from dataclasses import replace

import pytest

from prefill_node.geometry import REGION_ALIGNMENT, CapacityError, KvGeometry, choose_kv_blocks, total_bytes
from prefill_node.plan import plan_layer_buffers

GEOMETRY = KvGeometry(
    block_size=16, kv_lora_rank=64, rope_dim=16, index_dim=32, element_bytes=4, indexer_layers=frozenset({0, 1, 2})
)
PLAN = plan_layer_buffers(4, [0], 1)  # slots (0,), (1, 2, 3)


def test_block_bytes_of_layers_and_slots():
    assert GEOMETRY.layer_block(0) == (64 * 64, 16 * 64, 32 * 64, 0)
    assert GEOMETRY.layer_block(3).indexer_key == 0
    assert GEOMETRY.slot_block((1, 3)) == GEOMETRY.layer_block(1)
    assert GEOMETRY.slot_block((3,)).indexer_key == 0


def test_int8_index_keys_take_one_byte_and_a_half_precision_scale():
    block = replace(GEOMETRY, indexer_dtype="int8").layer_block(0)
    assert block == (64 * 64, 16 * 64, 32 * 16, 2 * 16)
    assert block.indexer == 34 * 16
    assert replace(GEOMETRY, indexer_dtype="int8").layer_block(3).indexer == 0


def test_each_slot_is_rounded_up_to_whole_registered_pages():
    assert total_bytes(PLAN, GEOMETRY, 1) == 2 * REGION_ALIGNMENT


def test_blocks_fill_the_free_memory():
    free = 8 * REGION_ALIGNMENT
    blocks = choose_kv_blocks(PLAN, GEOMETRY, free_bytes=free, max_model_len=160, max_requests=1000)
    assert total_bytes(PLAN, GEOMETRY, blocks) <= free < total_bytes(PLAN, GEOMETRY, blocks + 1)


def test_no_more_blocks_than_the_requests_can_use():
    blocks = choose_kv_blocks(PLAN, GEOMETRY, free_bytes=1 << 30, max_model_len=161, max_requests=3)
    assert blocks == 3 * 11


def test_a_device_too_small_for_one_request_is_refused():
    with pytest.raises(CapacityError, match=r"model\.max_model_len = 100000 .*hostcann\.hbm_bytes"):
        choose_kv_blocks(PLAN, GEOMETRY, free_bytes=2 * REGION_ALIGNMENT, max_model_len=100_000, max_requests=1)


def test_configured_blocks_too_few_for_one_request_are_refused():
    with pytest.raises(CapacityError, match=r"prefill\.kv_blocks = 9 .*at least 10"):
        choose_kv_blocks(PLAN, GEOMETRY, free_bytes=1 << 30, max_model_len=160, max_requests=4, configured=9)


def test_configured_blocks_that_do_not_fit_the_device_are_refused():
    with pytest.raises(CapacityError, match=r"prefill\.kv_blocks = 5000 needs .* are free"):
        choose_kv_blocks(
            PLAN, GEOMETRY, free_bytes=2 * REGION_ALIGNMENT, max_model_len=160, max_requests=4, configured=5000
        )


def test_configured_blocks_are_taken_as_they_are():
    assert choose_kv_blocks(PLAN, GEOMETRY, free_bytes=1 << 30, max_model_len=160, max_requests=4, configured=77) == 77
