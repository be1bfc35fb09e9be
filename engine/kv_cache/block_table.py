"""A sequence's block table and the chained keys of its full blocks."""

from dataclasses import dataclass, field

from octavo.common.prefix import ROOT_KEY


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks that hold a sequence's K/V.

    Attributes:
        blocks: physical block of each logical block; of the device's pool, or
            of the swap pool while `swapped`.
        num_tokens: how many tokens, from the front, the blocks are for.
        root: the parent of the first block's key.
        keys: keys of the leading full blocks that are published so far.
        swapped: whether the blocks are in CPU swap space.
    """

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    root: bytes = ROOT_KEY
    keys: list[bytes] = field(default_factory=list)
    swapped: bool = False
