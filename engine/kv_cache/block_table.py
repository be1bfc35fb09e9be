"""A sequence's block table and the chained keys of its full blocks."""

from dataclasses import dataclass, field

from octavo.common.prefix import ROOT_KEY


@dataclass(slots=True, eq=False)
class BlockTable:
    """Where a sequence's K/V lies.

    Attributes:
        blocks: physical block of each logical block; of the device's pool, or
            of the swap pool while `swapped`.
        num_tokens: how many tokens, from the front, the blocks are for.
        root: what its keys begin from.
        keys: keys of the leading full blocks that were named so far.
        swapped: whether the blocks are in CPU swap space.
    """

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    root: bytes = ROOT_KEY
    keys: list[bytes] = field(default_factory=list)
    swapped: bool = False
