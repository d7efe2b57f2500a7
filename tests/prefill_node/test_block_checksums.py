"""What a pool object's checksums say of rows that come back."""

from __future__ import annotations

import pytest
import torch

from prefill_node.block_checksums import NamedBlocks, broken, seal
from prefill_node.pool_layout import TensorAddress

KEYS = ("model@aa", "model@bb", "model@cc")
MAIN, INDEXER = (4, 1, 3), (0, 2, 5)
LAYER = 7


class Layer:
    """Main and indexer rows of one layer, sealed."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = [torch.randn(6, width, generator=generator) for width in (64, 8, 16)]
        self.tensors = [TensorAddress(rows.data_ptr(), rows[0].nbytes) for rows in self.rows]
        self.words = torch.zeros(6, dtype=torch.int32)
        seal(LAYER, NamedBlocks.of(KEYS, MAIN, INDEXER), self.words, self.tensors)

    def broken(self, layer: int = LAYER, keys: tuple[str, ...] = KEYS) -> list[int]:
        return broken(layer, NamedBlocks.of(keys, MAIN, INDEXER), self.words, self.tensors)


def test_rows_as_they_were_sealed_are_right():
    layer = Layer()
    assert layer.broken() == []
    assert layer.words[list(INDEXER)].unique().numel() == 3
    assert layer.words[[1, 3, 4]].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("part", "block", "index"), [(0, 1, 1), (1, 3, 2), (2, 0, 0)])
def test_a_changed_element_of_any_part_is_noticed(part: int, block: int, index: int):
    layer = Layer()
    layer.rows[part][block, -1] += 1e-3
    assert layer.broken() == [index]


def test_rows_of_another_layer_or_key_are_wrong_whatever_they_are():
    """Around a restart of the pool's service an object may be overwritten by another one, checksums and all."""
    layer = Layer()
    assert layer.broken(layer=LAYER + 1) == [0, 1, 2]
    assert layer.broken(keys=(KEYS[0], KEYS[2], KEYS[1])) == [1, 2]


def test_no_blocks_are_no_work():
    layer = Layer()
    nothing = NamedBlocks.of((), (), ())
    seal(LAYER, nothing, layer.words, layer.tensors)
    assert broken(LAYER, nothing, layer.words, layer.tensors) == []


def test_keys_of_different_lengths_are_not_one_prompts():
    layer = Layer()
    with pytest.raises(ValueError, match=r"keys of different lengths: \[7, 8\]"):
        layer.broken(keys=("model@a", *KEYS[1:]))
