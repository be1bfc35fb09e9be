"""A sequence's block tables and the chained keys of its full blocks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

RELEASED = -1
"""Entry of a block table whose block was released: no token attends to it, or a file has it."""


class Span(NamedTuple):
    """Tokens [start, end) of a sequence."""

    sequence_id: int
    start: int
    end: int


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks that hold a sequence's K and V, and its states.

    Attributes:
        groups: For each layer group, the physical block of each logical block or piece of the
            state; in the device's pool, or in the swap pool while `swapped`.
        num_tokens: Number of leading tokens that the blocks of unbounded groups cover.
        passed: For each layer group, the number of leading entries that are RELEASED.
        computed: Number of tokens in the state, including this step's.
        branch: Number of leading tokens whose K and V, but not the state, are cached; 0 for none.
        salt: The salt of the blocks' keys.
        keys: Keys of the leading blocks published so far, in blocks of the smallest size.
        snapshot: The keys under which the latest state of a decode was published.
        swapped: Whether the blocks are in CPU swap space.
    """

    groups: list[list[int]]
    num_tokens: int
    passed: list[int]
    computed: int = 0
    branch: int = 0
    salt: str = ""
    keys: list[bytes] = field(default_factory=list)
    snapshot: list[bytes] = field(default_factory=list)
    swapped: bool = False

    def blocks(self) -> Iterator[int]:
        """Yield all blocks, each group's last block first."""
        for blocks, passed in zip(self.groups, self.passed, strict=True):
            for i in range(len(blocks) - 1, passed - 1, -1):
                yield blocks[i]
