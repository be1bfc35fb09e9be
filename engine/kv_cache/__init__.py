"""The paged KV cache's bookkeeping: which block holds what. It knows no tensors."""

from octavo.engine.kv_cache.block_pool import BlockPool, OutOfBlocksError
from octavo.engine.kv_cache.manager import CacheCounters, CacheStats, KVCacheManager, Span
from octavo.engine.kv_cache.transfers import Transfers

__all__ = [
    "BlockPool",
    "CacheCounters",
    "CacheStats",
    "KVCacheManager",
    "OutOfBlocksError",
    "Span",
    "Transfers",
]
