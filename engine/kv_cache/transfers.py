"""Block copies at the beginning of a step."""

from dataclasses import dataclass, field

BlockPairs = list[tuple[int, int]]


@dataclass(slots=True)
class Transfers:
    """Copies to do before the next step computes, in this order.

    Attributes:
        swap_out: (device block, swap block).
        swap_in: (swap block, device block).
        copies: (device block, device block), for copy-on-write.
        spills: (device blocks, unit of the file), of the sequence that is spilled.
    """

    swap_out: BlockPairs = field(default_factory=list)
    swap_in: BlockPairs = field(default_factory=list)
    copies: BlockPairs = field(default_factory=list)
    spills: list[tuple[list[int], int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copies or self.spills)
