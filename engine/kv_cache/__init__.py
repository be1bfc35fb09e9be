"""The paged KV cache's books: which block holds what. Knows no tensors."""

from engine.kv_cache.block_pool import BlockPool, OutOfBlocksError
from engine.kv_cache.manager import CacheStats, KVCacheManager, Span, Transfers

__all__ = ["BlockPool", "CacheStats", "KVCacheManager", "OutOfBlocksError", "Span", "Transfers"]
