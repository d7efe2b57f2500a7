from __future__ import annotations

import pytest
import torch

from engine.ops import AscendLimits

INDEXER = {
    "rows": 14,
    "requests": 1,
    "heads": 64,
    "dims": 128,
    "block_size": 128,
    "max_blocks": 16384,
    "topk": 2048,
    "miss_capacity": 32768,
    "dtype": torch.bfloat16,
}
ATTENTION = {
    "rows": 16,
    "requests": 1,
    "heads": 8,
    "latent": 512,
    "rope": 64,
    "block_size": 128,
    "topk": 2048,
    "miss_capacity": 32768,
    "dtype": torch.float16,
}


def test_the_largest_legal_calls_pass() -> None:
    AscendLimits.check_indexer_manage(**INDEXER)
    AscendLimits.check_copy_attention(**ATTENTION)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"rows": 15}, "B <= T <= 14B"),
        ({"rows": 0}, "B <= T <= 14B"),
        ({"heads": 16}, "heads is 16; legal on Ascend: 32, 64"),
        ({"dims": 64}, "dims is 64"),
        ({"block_size": 64}, "block_size is 64; legal on Ascend: 128"),
        ({"max_blocks": 16385}, "max_blocks is 16385; legal on Ascend: 1 to 16384"),
        ({"topk": 64}, "topk is 64"),
        ({"miss_capacity": 2048}, "miss_capacity is 2048; legal on Ascend: 32768"),
        ({"dtype": torch.float32}, "dtype is torch.float32"),
    ],
)
def test_the_fused_indexer_is_bounded(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        AscendLimits.check_indexer_manage(**{**INDEXER, **change})


@pytest.mark.parametrize("change", [{"rows": 17}, {"heads": 4}, {"latent": 256}, {"rope": 32}, {"miss_capacity": 1}])
def test_copy_attention_is_bounded(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="legal on Ascend"):
        AscendLimits.check_copy_attention(**{**ATTENTION, **change})


@pytest.mark.parametrize("change", [{"heads": 65}, {"topk": 2049}, {"topk": 0}, {"dtype": torch.float32}])
def test_the_plain_indexer_is_bounded(change: dict[str, object]) -> None:
    names = "heads", "dims", "block_size", "max_blocks", "topk", "dtype"
    legal = {name: INDEXER[name] for name in names} | {"heads": 5, "topk": 7}
    AscendLimits.check_indexer(**legal)
    with pytest.raises(ValueError, match="legal on Ascend"):
        AscendLimits.check_indexer(**{**legal, **change})


def test_hot_buffers_are_bounded() -> None:
    AscendLimits.check_cache_tokens(2048)
    AscendLimits.check_cache_tokens(32640)
    for tokens, match in (
        (1920, "2048 to 32640"),
        (32768, "2048 to 32640"),
        (2100, "cache_tokens is 2100; legal on Ascend: multiples of 128"),
    ):
        with pytest.raises(ValueError, match=match):
            AscendLimits.check_cache_tokens(tokens)


def test_heads_are_padded_to_the_next_legal_number() -> None:
    assert [AscendLimits.attention_heads(heads) for heads in (1, 8, 9, 64, 65, 128)] == [8, 8, 16, 64, 128, 128]
    for heads in (0, 129):
        with pytest.raises(ValueError, match=f"heads is {heads}; legal on Ascend: 1 to 128"):
            AscendLimits.attention_heads(heads)
