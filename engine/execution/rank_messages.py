"""The messages from rank 0 to the other ranks: numbers, and the buffer of a step's arrays.

The numbers of a step say how all ranks run it: which recorded graph they replay, whether they
return logits or tokens, and where the tokens come from that rank 0 has sampled but not read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain

import numpy as np

from octavo.engine.execution.step_arrays import ALIGNMENT, StepArrays
from octavo.engine.kv_cache import Transfers


class Kind(IntEnum):
    """The type of a message."""

    ALLOCATE = 0
    COUNT = 1
    COPY = 2
    STEP = 3
    WATCH = 4
    STOP = 5
    LOAD_ADAPTER = 6
    DROP_ADAPTERS = 7
    RECORD = 8
    MEASURE = 9


@dataclass(frozen=True, slots=True)
class RankStep:
    """A step as all ranks compute it.

    Attributes:
        transfers: Copies of blocks before the step.
        arrays: The step's arrays.
        most_likely: Whether ranks return the most likely tokens instead of logits.
        graph: Number of the recorded graph that all ranks replay; `NO_GRAPH` for none.
        filled: Whether rank 0 broadcasts the token ids, as it has sampled some but not read them.
        longest: See `to_inputs`; 0 for the actual lengths.
        adapters: The number of each sequence's adapter; empty if none has one.
        has_images: Whether rank 0 broadcasts image embeddings next; see `rank_images.py`.
    """

    transfers: Transfers
    arrays: StepArrays
    most_likely: bool
    graph: int = 0
    filled: bool = False
    longest: int = 0
    adapters: Sequence[int] = ()
    has_images: bool = False

    def message(self) -> np.ndarray:
        """Return its message."""
        arrays = self.arrays.pack()
        assert arrays.packed is not None
        sizes = arrays.sizes
        flags = [self.most_likely, self.graph, self.filled, self.longest, self.has_images]
        counts = [len(sizes), len(self.adapters)]
        transfers = pack_transfers(self.transfers)
        numbers = [*flags, *counts, *sizes, *self.adapters, *transfers]
        return message_of(Kind.STEP, numbers, arrays.packed)

    @classmethod
    def read(cls, numbers: Sequence[int], packed: np.ndarray) -> "RankStep":
        """Return the step of a message's numbers and buffer."""
        most_likely, graph, filled, longest, has_images, *rest = numbers
        num_sizes, num_adapters, *rest = rest
        sizes, rest = rest[:num_sizes], rest[num_sizes:]
        return cls(
            unpack_transfers(rest[num_adapters:]),
            StepArrays.unpack(sizes, packed),
            bool(most_likely),
            graph,
            bool(filled),
            longest,
            rest[:num_adapters],
            bool(has_images),
        )


def message_of(
    kind: Kind, numbers: Sequence[int] = (), packed: np.ndarray | None = None
) -> np.ndarray:
    """Return a message, `[n]` uint8.

    Args:
        kind: Its type.
        numbers: Its numbers.
        packed: `[n]` uint8, its buffer, if it has one.
    """
    head = np.array([kind, len(numbers), *numbers], np.int64).view(np.uint8)
    if packed is None:
        return head
    padding = np.zeros(_end_of(len(numbers)) - len(head), np.uint8)
    return np.concatenate([head, padding, packed])


def read_message(message: np.ndarray) -> tuple[Kind, list[int], np.ndarray]:
    """Return the type, the numbers and the buffer, `[n]` uint8, of a message."""
    kind, count = message[:16].view(np.int64).tolist()
    numbers: list[int] = message[16 : 16 + 8 * count].view(np.int64).tolist()
    return Kind(kind), numbers, message[_end_of(count) :]


def _end_of(count: int) -> int:
    """Return the place of the buffer behind some numbers."""
    return -(-(16 + 8 * count) // ALIGNMENT) * ALIGNMENT


def pack_transfers(transfers: Transfers) -> list[int]:
    """Return transfers as numbers."""
    pairs = transfers.swap_out, transfers.swap_in, transfers.copies
    return [*map(len, pairs), *chain.from_iterable(chain(*pairs))]


def unpack_transfers(numbers: Sequence[int]) -> Transfers:
    """Return the transfers from the result of `pack_transfers`."""
    numbers_left: Iterable[int] = iter(numbers[3:])
    pairs = zip(numbers_left, numbers_left, strict=True)
    swap_out, swap_in, copies = ([next(pairs) for _ in range(count)] for count in numbers[:3])
    return Transfers(swap_out, swap_in, copies)
