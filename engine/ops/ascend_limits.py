"""What the Ascend operators of the same names demand beyond the general contract (A2/A3, bfloat16/float16)."""

from __future__ import annotations

from typing import Final

import torch


class AscendLimits:
    """Constants of the Ascend operators and checks of a call's sizes against them; each raises ValueError."""

    TOPK: Final = 2048
    BLOCK: Final = 128
    INDEX_HEADS: Final = (32, 64)
    INDEX_DIMS: Final = 128
    MAX_ROUTES: Final = 14  # rows per request of the fused indexer
    MAX_BLOCKS: Final = 1 << 14
    MISS_CAPACITY: Final = 32768
    MAX_CACHE_TOKENS: Final = 32640
    ATTENTION_HEADS: Final = (8, 16, 32, 64, 128)
    LATENT: Final = 512
    ROPE: Final = 64
    MAX_ATTENTION_ROWS: Final = 16  # rows per request of Copy-SFA
    DTYPES: Final = (torch.bfloat16, torch.float16)

    @classmethod
    def check_indexer_manage(
        cls,
        *,
        rows: int,
        requests: int,
        heads: int,
        dims: int,
        block_size: int,
        max_blocks: int,
        topk: int,
        miss_capacity: int,
        cache_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        """Check a call of ``fused_lightning_indexer_manage``; ``cache_tokens`` is the largest of the batch."""
        cls._among("heads", heads, cls.INDEX_HEADS)
        cls._among("dims", dims, (cls.INDEX_DIMS,))
        cls._among("block_size", block_size, (cls.BLOCK,))
        cls._among("topk", topk, (cls.TOPK,))
        cls._among("miss_capacity", miss_capacity, (cls.MISS_CAPACITY,))
        cls._among("dtype", dtype, cls.DTYPES)
        cls._between("max_blocks", max_blocks, 1, cls.MAX_BLOCKS)
        cls._between("cache_tokens", cache_tokens, 0, cls.MAX_CACHE_TOKENS)
        cls._rows(rows, requests, cls.MAX_ROUTES)

    @classmethod
    def check_copy_attention(
        cls,
        *,
        rows: int,
        requests: int,
        heads: int,
        latent: int,
        rope: int,
        block_size: int,
        topk: int,
        miss_capacity: int,
        dtype: torch.dtype,
    ) -> None:
        """Check a call of ``fused_scatter_copy_sparse_flash_attention``."""
        cls._among("heads", heads, cls.ATTENTION_HEADS)
        cls._among("latent", latent, (cls.LATENT,))
        cls._among("rope", rope, (cls.ROPE,))
        cls._among("block_size", block_size, (cls.BLOCK,))
        cls._among("topk", topk, (cls.TOPK,))
        cls._among("miss_capacity", miss_capacity, (cls.MISS_CAPACITY,))
        cls._among("dtype", dtype, cls.DTYPES)
        cls._rows(rows, requests, cls.MAX_ATTENTION_ROWS)

    @staticmethod
    def _among(name: str, value: object, legal: tuple[object, ...]) -> None:
        if value not in legal:
            raise ValueError(f"{name} is {value}; legal on Ascend: {', '.join(map(str, legal))}")

    @staticmethod
    def _between(name: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}; legal on Ascend: {low} to {high}")

    @staticmethod
    def _rows(rows: int, requests: int, most: int) -> None:
        if not requests <= rows <= most * requests:
            raise ValueError(f"T = {rows} rows for B = {requests} requests; legal on Ascend: B <= T <= {most}B")
