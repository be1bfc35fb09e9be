"""Chooses the prefix blocks to read from a slower tier, their swap blocks, and those to write."""

from collections.abc import Sequence

from octavo.engine.kv_cache.prefix_publishing import PrefixPublisher
from octavo.engine.kv_cache.prefixes import STORED, PrefixFinder
from octavo.engine.kv_cache.swap_moves import SwapMoves


class StoredPrefixes:
    """Extends the prefix cache by the blocks that a slower tier keeps.

    They are read into swap space, where they are cached like offloaded blocks.
    """

    def __init__(
        self,
        in_memory: PrefixFinder,
        anywhere: PrefixFinder,
        publisher: PrefixPublisher,
        moves: SwapMoves,
    ) -> None:
        """Have the publisher list blocks to write.

        Args:
            in_memory: Finds prefixes on the device and in swap space.
            anywhere: Finds them in the tier, too.
            publisher: Publishes computed blocks.
            moves: Orders copies between the device and swap space.
        """
        self._in_memory = in_memory
        self._anywhere = anywhere
        self._publisher = publisher
        self._moves = moves
        publisher.lists_unsaved = True

    def missing(self, token_ids: Sequence[int], salt: str) -> tuple[list[bytes], int]:
        """Return the keys to read for the longest prefix, and its tokens that memory lacks.

        No keys, if swap space has too few blocks for them.
        """
        prefix = self._anywhere.find(token_ids, salt)
        keys = [hit.key for hit in prefix.hits() if hit.block == STORED]
        if not keys or len(keys) > self._moves.num_places:
            return [], 0
        return keys, prefix.num_tokens - self._in_memory.find(token_ids, salt).num_tokens

    def place(self, key: bytes) -> int | None:
        """Return a block of swap space for a stored block, which the caller fills at once.

        None if memory has it already, or if every block is in use.
        """
        return self._moves.place(key)

    def take_unsaved(self) -> list[tuple[int, bytes]]:
        """Return the device blocks published since the last call, with their keys."""
        blocks, self._publisher.unsaved = self._publisher.unsaved, []
        return blocks
