"""What the Ascend operators demand beyond the general contract (A2/A3)."""

from __future__ import annotations

from typing import Final

import torch


class AscendLimits:
    """Constants of the Ascend operators, and checks of a call's sizes against them; each raises ValueError.

    Attributes name the operators of vllm-ascend and torch_npu they hold for; sizes are numbers of elements.
    """

    TOPK: Final = 2048  # entries per row of the fused operators; the most of the plain indexer
    BLOCK: Final = 128  # rows per cache block
    MAX_BLOCKS: Final = 1 << 14  # columns of a block table
    DTYPES: Final = (torch.bfloat16, torch.float16)

    INDEX_HEADS: Final = (32, 64)  # of the fused indexer
    MAX_INDEX_HEADS: Final = 64  # of the plain one
    INDEX_DIMS: Final = 128
    MAX_ROUTES: Final = 14  # rows per request of the fused indexer
    MISS_CAPACITY: Final = 32768
    MAX_CACHE_TOKENS: Final = 32640  # hot slots per request

    ATTENTION_HEADS: Final = (8, 16, 32, 64, 128)
    LATENT: Final = 512
    ROPE: Final = 64
    MAX_ATTENTION_ROWS: Final = 16  # rows per request of Copy-SFA

    @classmethod
    def check_indexer(
        cls, *, heads: int, dims: int, block_size: int, max_blocks: int, topk: int, dtype: torch.dtype
    ) -> None:
        """Check a call of ``npu_lightning_indexer``, or with ``dtype`` int8 of ``npu_quant_lightning_indexer``."""
        cls._between("heads", heads, 1, cls.MAX_INDEX_HEADS)
        cls._among("dims", dims, (cls.INDEX_DIMS,))
        cls._among("block_size", block_size, (cls.BLOCK,))
        cls._between("max_blocks", max_blocks, 1, cls.MAX_BLOCKS)
        cls._between("topk", topk, 1, cls.TOPK)
        cls._among("dtype", dtype, (*cls.DTYPES, torch.int8))

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
        dtype: torch.dtype,
    ) -> None:
        """Check a call of ``npu_fused_lightning_indexer_manage``, or with ``dtype`` int8 of its quantised twin."""
        cls._among("heads", heads, cls.INDEX_HEADS)
        cls._among("topk", topk, (cls.TOPK,))
        cls.check_indexer(heads=heads, dims=dims, block_size=block_size, max_blocks=max_blocks, topk=topk, dtype=dtype)
        cls._among("miss_capacity", miss_capacity, (cls.MISS_CAPACITY,))
        cls._rows(rows, requests, cls.MAX_ROUTES)

    @classmethod
    def check_cache_tokens(cls, tokens: int) -> None:
        """Check the hot slots of a request, C; the fused indexer gives an illegal C no message, only -1 rows."""
        cls._between("cache_tokens", tokens, cls.TOPK, cls.MAX_CACHE_TOKENS)
        if tokens % cls.BLOCK != 0:
            raise ValueError(f"cache_tokens is {tokens}; legal on Ascend: multiples of {cls.BLOCK}")

    @classmethod
    def check_attention(cls, *, heads: int, latent: int, rope: int, block_size: int, dtype: torch.dtype) -> None:
        """Check a call of ``npu_sparse_flash_attention``."""
        cls._among("heads", heads, cls.ATTENTION_HEADS)
        cls._among("latent", latent, (cls.LATENT,))
        cls._among("rope", rope, (cls.ROPE,))
        cls._among("block_size", block_size, (cls.BLOCK,))
        cls._among("dtype", dtype, cls.DTYPES)

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
        """Check a call of ``npu_fused_scatter_copy_sparse_flash_attention``."""
        cls.check_attention(heads=heads, latent=latent, rope=rope, block_size=block_size, dtype=dtype)
        cls._among("topk", topk, (cls.TOPK,))
        cls._among("miss_capacity", miss_capacity, (cls.MISS_CAPACITY,))
        cls._rows(rows, requests, cls.MAX_ATTENTION_ROWS)

    @classmethod
    def attention_heads(cls, heads: int) -> int:
        """The smallest legal number of attention heads that holds ``heads``; the rest is to be zeros."""
        cls._between("heads", heads, 1, cls.ATTENTION_HEADS[-1])
        return next(legal for legal in cls.ATTENTION_HEADS if legal >= heads)

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
