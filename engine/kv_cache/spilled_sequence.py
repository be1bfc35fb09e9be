"""Moves the first tokens of a sequence that is longer than the cache to a file."""

from octavo.common.kv_cache.layer_groups import LayerGroup, most_kept
from octavo.engine.kv_cache.block_pool import OutOfBlocksError
from octavo.engine.kv_cache.block_table import RELEASED, BlockTable, Span
from octavo.engine.kv_cache.swap_moves import SwapMoves


class FileTakenError(OutOfBlocksError):
    """The file of the spilled sequence holds another one."""


class SpilledSequence:
    """Moves earlier blocks of a sequence to the file, in units, and releases them.

    Attributes:
        id: Id of the sequence; None if the file holds none.
        kept: Maximum tokens of a sequence that stay in blocks.
    """

    def __init__(self, groups: tuple[LayerGroup, ...], moves: SwapMoves) -> None:
        self.id: int | None = None
        self.kept = most_kept(groups)
        self._groups = groups
        self._moves = moves

    def outgrows(self, num_tokens: int) -> bool:
        """Return whether a sequence of `num_tokens` tokens has more than stay in blocks."""
        return num_tokens > self.kept

    def num_units(self, table: BlockTable) -> int:
        """Return the number of units of the file that hold its first tokens."""
        (layers,) = self._groups
        return table.passed[0] * layers.block_size // layers.unit

    def spill(self, table: BlockTable, span: Span) -> None:
        """Spill the blocks that tokens from the span's start on do not read in blocks.

        Raises:
            FileTakenError: The file holds another sequence.
        """
        if self.id not in (None, span.sequence_id):
            raise FileTakenError(f"the file holds tokens of sequence {self.id}")
        self.id = span.sequence_id
        (layers,), (blocks,) = self._groups, table.groups
        size = layers.unit // layers.block_size
        for begin in range(table.passed[0], layers.first_block(span.start), size):
            self._moves.spill(blocks[begin : begin + size], begin // size)
            blocks[begin : begin + size] = [RELEASED] * size
            table.passed[0] = begin + size
