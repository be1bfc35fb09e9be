"""Chooses the prefix blocks to read from a slower tier, their swap blocks, and those to write."""

from collections.abc import Sequence

from octavo.engine.kv_cache.prefixes import STORED, IsStored, PrefixCache
from octavo.engine.kv_cache.swap_moves import SwapMoves


class StoredPrefixes:
    """Extends the prefix cache by the blocks that a slower tier keeps.

    They are read into swap space, where they are cached like offloaded blocks.
    """

    def __init__(self, prefixes: PrefixCache, moves: SwapMoves, is_stored: IsStored) -> None:
        """Have the prefix cache list blocks to write.

        Args:
            prefixes: Finds and publishes prefixes on the device and in swap space.
            moves: Orders copies between the device and swap space.
            is_stored: Whether the tier has a key.
        """
        self._prefixes = prefixes
        self._moves = moves
        self._is_stored = is_stored
        prefixes.lists_unsaved = True

    def missing(self, token_ids: Sequence[int], salt: str) -> tuple[list[bytes], int]:
        """Return the keys to read for the longest prefix, and its tokens that memory lacks.

        No keys, if swap space has too few blocks for them.
        """
        prefix = self._prefixes.find(token_ids, salt, self._is_stored)
        keys = [hit.key for hit in prefix.hits() if hit.block == STORED]
        if not keys or len(keys) > self._moves.num_places:
            return [], 0
        return keys, prefix.num_tokens - self._prefixes.find(token_ids, salt).num_tokens

    def place(self, key: bytes) -> int | None:
        """Return a block of swap space for a stored block, which the caller fills at once.

        None if memory has it already, or if every block is in use.
        """
        return self._moves.place(key)

    def keep_contents(self, token_ids: Sequence[int], salt: str) -> None:
        """Keep what a prompt's blocks hold, once they are placed, for `KVCacheManager.contents`."""
        if not salt:
            self._prefixes.keep_contents(token_ids)

    def take_unsaved(self) -> list[tuple[int, bytes]]:
        """Return the device blocks published since the last call, with their keys."""
        blocks, self._prefixes.unsaved = self._prefixes.unsaved, []
        return blocks
