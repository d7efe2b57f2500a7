"""Paged KV cache bookkeeping: ``BlockPool`` -> ``SingleTypeKVCacheManager`` -> ``KVCacheManager``.

No tensors live here; a block id is an index into whatever memory its cache type has on a node.
"""

from engine.kv_cache.block_pool import BlockPool, NoFreeBlocks
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.single_type import CacheSpec, SingleTypeKVCacheManager, Usage

__all__ = ["BlockPool", "CacheSpec", "KVCacheManager", "NoFreeBlocks", "SingleTypeKVCacheManager", "Usage"]
