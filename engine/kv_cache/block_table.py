"""A sequence's block tables and the chained keys of its full blocks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.common.kv_cache.prefix_hash import ROOT_KEY

RELEASED = -1
"""In a block table: the block was released, as no token to come attends to it."""


class Span(NamedTuple):
    """Tokens [start, end) of a sequence."""

    sequence_id: int
    start: int
    end: int


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks that hold a sequence's K and V, and its states.

    Attributes:
        groups: For each layer group the physical block of each logical block, or of each piece of
            the state; of the device's pool, or of the swap pool while `swapped`.
        num_tokens: How many tokens, from the front, the blocks of unbounded groups are for.
        passed: For each layer group, the number of leading entries that are RELEASED.
        computed: The tokens that the state stands for, this step's included.
        branch: Where the prefix cache has all K and V up to, but no state; 0 for nowhere.
        root: The parent of the first block's key.
        keys: Keys of the leading blocks that are published so far, in blocks of the smallest size.
        snapshot: The keys under which the latest state of a decode was published.
        swapped: Whether the blocks are in CPU swap space.
    """

    groups: list[list[int]]
    num_tokens: int
    passed: list[int]
    computed: int = 0
    branch: int = 0
    root: bytes = ROOT_KEY
    keys: list[bytes] = field(default_factory=list)
    snapshot: list[bytes] = field(default_factory=list)
    swapped: bool = False

    def blocks(self) -> Iterator[int]:
        """Yield every block that it holds, each group's last first."""
        for blocks, passed in zip(self.groups, self.passed, strict=True):
            for i in range(len(blocks) - 1, passed - 1, -1):
                yield blocks[i]
