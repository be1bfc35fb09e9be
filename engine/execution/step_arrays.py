"""A step's work as plain arrays, which may lie in one buffer: one message, one copy to a GPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.host_copies import to_device

ALIGNMENT = 16
"""Divisor of each array's place in a buffer: kernels read aligned vectors."""
NUM_LONG = 2
"""Number of arrays of int64, which are first in a buffer; the others are int32."""
LONG, SHORT = np.dtype(np.int64), np.dtype(np.int32)
KEPT_PLACES = 256
"""Numbers of sizes whose places are kept: those of decodes stay the same for some steps."""


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A step's work as plain arrays: all that other ranks need of a batch.

    Attributes:
        laid: `[2 + groups, num_tokens]` int64: token ids, positions, and the slots of each group.
        query_starts: `[num_seqs + 1]` int32, each sequence's first token in the batch.
        query_lens: `[num_seqs]` int32, each sequence's number of tokens in the batch.
        seq_lens: `[num_seqs]` int32, the same plus all earlier tokens.
        rows: `[num_rows]` int64, the tokens whose logits are needed; the first if none are.
        tables: `[num_seqs, width]` int32, each group's block tables.
        packed: `[n]` uint8, the buffer that has all other arrays; None if they lie apart.
    """

    laid: np.ndarray
    query_starts: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    rows: np.ndarray
    tables: Sequence[np.ndarray]
    packed: np.ndarray | None = field(default=None, init=False)  # so that `replace` drops it

    @property
    def sizes(self) -> list[int]:
        """The numbers from which `unpack` knows the shapes: at least five."""
        widths = [table.shape[1] for table in self.tables]
        return [*self.laid.shape, len(self.query_lens), len(self.rows), *widths]

    def pack(self) -> "StepArrays":
        """Return the same arrays in one buffer."""
        if self.packed is not None:
            return self
        places = _places(tuple(self.sizes))
        packed = np.empty(places[-1].end, np.uint8)
        arrays = (self.laid, self.rows, self.query_starts, self.query_lens, self.seq_lens)
        for place, array in zip(places, (*arrays, *self.tables), strict=True):
            place.of(packed)[...] = array
        return _with_buffer(packed, *arrays, *self.tables)

    @classmethod
    def unpack(cls, sizes: Sequence[int], packed: np.ndarray) -> "StepArrays":
        """Return the arrays of a buffer, as views.

        Args:
            sizes: The arrays' `sizes`.
            packed: `[n]` uint8.
        """
        return _with_buffer(packed, *(place.of(packed) for place in _places(tuple(sizes))))

    def to(self, device: torch.device) -> list[Tensor]:
        """Copy the arrays to a device: to a GPU in one copy; on a CPU, share their memory.

        Returns:
            `laid`, `rows`, `query_starts`, `query_lens`, `seq_lens`, and each of `tables`.
        """
        if device.type == "cpu":
            lengths = self.query_starts, self.query_lens, self.seq_lens
            return list(map(torch.from_numpy, (self.laid, self.rows, *lengths, *self.tables)))
        together = self.pack()
        assert together.packed is not None
        packed = to_device(together.packed, device)
        return [place.of_tensor(packed) for place in _places(tuple(self.sizes))]


def _with_buffer(packed: np.ndarray, *arrays: np.ndarray) -> StepArrays:
    """Return a step's arrays, in the order of `_places`, with the buffer that has them."""
    laid, rows, query_starts, query_lens, seq_lens, *tables = arrays
    step = StepArrays(laid, query_starts, query_lens, seq_lens, rows, tables)
    object.__setattr__(step, "packed", packed)
    return step


class _Place(NamedTuple):
    """The place of an array in a buffer, in bytes."""

    begin: int
    end: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def of(self, packed: np.ndarray) -> np.ndarray:
        """Return the array in a buffer, `[n]` uint8."""
        return np.ndarray(self.shape, self.dtype, packed, self.begin)

    def of_tensor(self, packed: Tensor) -> Tensor:
        """Return the tensor in a buffer, `[n]` uint8."""
        dtype = torch.int64 if self.dtype == LONG else torch.int32
        return packed[self.begin : self.end].view(dtype).view(self.shape)


@lru_cache(KEPT_PLACES)
def _places(sizes: tuple[int, ...]) -> list[_Place]:
    """Return the places of `laid`, `rows`, `query_starts`, `query_lens`, `seq_lens`, `tables`."""
    lanes, tokens, seqs, rows, *widths = sizes
    shapes: list[tuple[int, ...]] = [(lanes, tokens), (rows,), (seqs + 1,), (seqs,), (seqs,)]
    shapes += [(seqs, width) for width in widths]
    places, end = list[_Place](), 0
    for number, shape in enumerate(shapes):
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        dtype = LONG if number < NUM_LONG else SHORT
        end = begin + math.prod(shape) * dtype.itemsize
        places.append(_Place(begin, end, dtype, shape))
    return places
