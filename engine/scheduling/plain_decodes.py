"""Plain decodes, kept in arrays from step to step.

A plain decode is the only output of its request, and only its last token is computed. The scheduler
looks at a single one only when it needs a new block or its output ends, so a step creates no Python
objects for the others. On a GPU this decides the speed, because a step takes hardly longer than its
host work: see `benchmarks/results/host_time.md`.
"""

from collections.abc import Iterable

import numpy as np

from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.kv_cache.block_table import BlockTable
from octavo.engine.scheduling.batch import Samples
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup


class KeptDecodes:
    """The plain decodes among the running groups, in no particular order.

    A group's `decode_row` is its row here. Call `refresh` after its block table grows. Call
    `remove` before its block table changes otherwise, or before a step computes more than one of
    its tokens.

    Args:
        block_sizes: Tokens per block of each layer group.
    """

    def __init__(self, block_sizes: Iterable[int]) -> None:
        self._block_sizes = tuple(block_sizes)
        self._groups: list[SequenceGroup] = []
        self._sequences: list[Sequence] = []
        self._tables: list[BlockTable] = []
        self._blocks = [np.zeros((1, 1), np.int32) for _ in self._block_sizes]
        self._starts = np.zeros(1, np.int64)  # of the next step
        self._limits = np.zeros(1, np.int64)  # of the last tokens, which are not computed
        self._numbers = np.zeros(1, np.uint64)
        self._sessions = np.zeros(1, np.int64)
        self._greedy = np.zeros(1, np.bool_)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: SequenceGroup, table: BlockTable) -> None:
        """Add a group whose only sequence has all but its last token computed.

        Args:
            group: The group; not in this object yet.
            table: The sequence's block table, with a writable slot for that token.
        """
        assert group.decode_row is None
        (sequence,) = group.sequences
        row = group.decode_row = len(self._groups)
        self._groups.append(group)
        self._sequences.append(sequence)
        self._tables.append(table)
        request = group.request
        self._starts = _grown(self._starts, row + 1)
        self._limits = _grown(self._limits, row + 1)
        self._numbers = _grown(self._numbers, row + 1)
        self._sessions = _grown(self._sessions, row + 1)
        self._greedy = _grown(self._greedy, row + 1)
        self._starts[row] = sequence.num_computed
        self._limits[row] = sequence.num_prompt + request.max_tokens - 1
        self._numbers[row] = request.first_number
        self._sessions[row] = request.session
        self._greedy[row] = request.takes_greatest
        for i, blocks in enumerate(self._blocks):
            self._blocks[i] = _grown(blocks, row + 1, 1)
            self._blocks[i][row] = 0
        self.refresh(group, 0)

    def refresh(self, group: SequenceGroup, position: int) -> None:
        """Copy a group's blocks, from the block of `position` to the last one."""
        row = group.decode_row
        assert row is not None
        for i, (table, size) in enumerate(
            zip(self._tables[row].groups, self._block_sizes, strict=True)
        ):
            first = position // size
            blocks = self._blocks[i] = _grown(self._blocks[i], row + 1, len(table))
            blocks[row, first : len(table)] = table[first:]

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group if it is here."""
        if group.decode_row is None:
            return
        row, last = group.decode_row, len(self._groups) - 1
        self._groups[row] = self._groups[last]
        self._sequences[row] = self._sequences[last]
        self._tables[row] = self._tables[last]
        columns = self._starts, self._limits, self._numbers, self._sessions, self._greedy
        for array in (*columns, *self._blocks):
            array[row] = array[last]
        for column in (self._groups, self._sequences, self._tables):
            column.pop()
        if row < last:
            self._groups[row].decode_row = row
        group.decode_row = None

    def begin_step(self) -> list[SequenceGroup]:
        """Remove the sequences whose last token has been sampled.

        Returns:
            The groups whose next token needs a block that may not be allocated yet.
        """
        over = np.flatnonzero(self._starts[: len(self)] >= self._limits[: len(self)])
        for group in [self._groups[i] for i in over]:
            self.remove(group)
        starts = self._starts[: len(self)]
        begins = starts % self._block_sizes[0] == 0
        for size in self._block_sizes[1:]:
            begins |= starts % size == 0
        return [self._groups[i] for i in np.flatnonzero(begins)]

    def begin_blocks(
        self, cache: KVCacheManager, groups: list[SequenceGroup], *, spare: int
    ) -> bool:
        """Allocate the blocks for the next tokens of some groups, if enough are available.

        Args:
            cache: The KV cache.
            groups: Groups from `begin_step` that are still here.
            spare: Number of blocks that must stay available.

        Returns:
            Whether the blocks were allocated; if not, nothing has changed.
        """
        if not groups:
            return True
        rows = [group.decode_row for group in groups if group.decode_row is not None]
        tables = [self._tables[row] for row in rows]
        if not cache.append_blocks(tables, self._starts[rows].tolist(), spare=spare):
            return False
        for i in range(len(self._blocks)):
            lasts = [table.groups[i][-1] for table in tables]
            places = [len(table.groups[i]) - 1 for table in tables]
            self._blocks[i] = blocks = _grown(self._blocks[i], 1, max(places) + 1)
            blocks[rows, places] = lasts
        return True

    def next_step(self) -> tuple[Samples, list[np.ndarray]]:
        """Return the tokens of the next step and the block tables, and count it as computed."""
        count = len(self)
        self._starts[:count] += 1
        positions = self._starts[:count].copy()
        for table, end in zip(self._tables, positions.tolist(), strict=True):
            table.num_tokens = table.computed = end
        most = int(positions.max()) - 1 if count else 0
        samples = Samples(
            list(self._groups),
            list(self._sequences),
            positions,
            self._limits[:count].copy(),
            self._numbers[:count].copy(),
            self._sessions[:count].copy(),
            self._greedy[:count].copy(),
            np.arange(count),
        )
        return samples, [
            blocks[:count, : most // size + 1].copy()
            for blocks, size in zip(self._blocks, self._block_sizes, strict=True)
        ]


def _grown(array: np.ndarray, *shape: int) -> np.ndarray:
    """Return an array of at least `shape`: itself, or a copy of twice the size, zero-padded."""
    if all(have >= want for have, want in zip(array.shape, shape, strict=True)):
        return array
    room = [
        have if have >= want else 2 * want for have, want in zip(array.shape, shape, strict=True)
    ]
    larger = np.zeros(room, array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger
