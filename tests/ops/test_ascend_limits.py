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
    "cache_tokens": 32640,
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
        ({"cache_tokens": 32768}, "cache_tokens is 32768"),
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
