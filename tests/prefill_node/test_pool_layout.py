from dataclasses import replace

import pytest

from prefill_node.geometry import KvGeometry
from prefill_node.pool_layout import PoolObjectLayout, TensorAddress

GEOMETRY = KvGeometry(
    block_size=2, kv_lora_rank=10, rope_dim=5, index_dim=4, element_bytes=1, indexer_layers=frozenset({0, 2})
)


def test_an_object_holds_every_layer_once_without_gaps():
    layout = PoolObjectLayout(GEOMETRY, num_layers=3)
    assert layout.parts(0) == ((0, 20), (20, 10), (30, 8))
    assert layout.parts(1) == ((38, 20), (58, 10))
    assert layout.parts(2) == ((68, 20), (88, 10), (98, 8))
    assert layout.object_bytes == 106


def test_copy_pairs_device_blocks_with_their_objects():
    layout = PoolObjectLayout(GEOMETRY, num_layers=3)
    tensors = [TensorAddress(1000, 20), TensorAddress(2000, 10), TensorAddress(3000, 8)]
    copy = layout.copy(2, tensors, main_blocks=[2, 3], indexer_blocks=[7, 5], objects=[10_000, 20_000])
    assert list(copy.device) == [1040, 1060, 2020, 2030, 3056, 3040]
    assert list(copy.pool) == [10_068, 20_068, 10_088, 20_088, 10_098, 20_098]
    assert list(copy.sizes) == [20, 20, 10, 10, 8, 8]
    assert copy.nbytes == 76


def test_scales_of_int8_keys_follow_the_keys_and_use_the_indexers_blocks():
    layout = PoolObjectLayout(replace(GEOMETRY, indexer_dtype="int8"), num_layers=3)
    assert layout.parts(2) == ((72, 20), (92, 10), (102, 8), (110, 4))
    tensors = [TensorAddress(1000, 20), TensorAddress(2000, 10), TensorAddress(3000, 8), TensorAddress(4000, 4)]
    copy = layout.copy(2, tensors, main_blocks=[2], indexer_blocks=[7], objects=[10_000])
    assert list(copy.device) == [1040, 2020, 3056, 4028]
    assert list(copy.pool) == [10_072, 10_092, 10_102, 10_110]


def test_layers_without_an_indexer_copy_main_kv_only():
    layout = PoolObjectLayout(GEOMETRY, num_layers=3)
    tensors = [TensorAddress(1000, 20), TensorAddress(2000, 10), TensorAddress(3000, 8)]
    assert list(layout.copy(1, tensors, [0], [0], [500]).pool) == [538, 558]


def test_lists_of_different_lengths_are_refused():
    layout = PoolObjectLayout(GEOMETRY, num_layers=1)
    with pytest.raises(ValueError, match="2 main blocks, 1 indexer blocks and 2 pool objects"):
        layout.copy(0, [TensorAddress(0, 20)] * 3, [0, 1], [0], [1, 2])


def test_with_checksums_every_layer_ends_with_a_word():
    layout = PoolObjectLayout(GEOMETRY, num_layers=2, checksums=True)
    assert layout.parts(0) == ((0, 20), (20, 10), (30, 8), (38, 4))
    assert layout.parts(1) == ((42, 20), (62, 10), (72, 4))
