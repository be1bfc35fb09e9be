"""The paged KV cache's bookkeeping of blocks, without tensors."""

from octavo.engine.kv_cache.block_pool import BlockPool, OutOfBlocksError
from octavo.engine.kv_cache.block_table import Span
from octavo.engine.kv_cache.manager import KVCacheManager
from octavo.engine.kv_cache.prefixes import BlockContents, PrefixCache
from octavo.engine.kv_cache.spilled_sequence import FileTakenError
from octavo.engine.kv_cache.transfers import Transfers

__all__ = [
    "BlockContents",
    "BlockPool",
    "FileTakenError",
    "KVCacheManager",
    "OutOfBlocksError",
    "PrefixCache",
    "Span",
    "Transfers",
]
