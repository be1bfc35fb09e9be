"""Recognizes the type of a model's attention mask.

transformers describes a mask as a function of (batch, head, query, key). It can be evaluated at any
position, so a window of 4,096 tokens is found without a prompt of that length.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.masking_utils import sdpa_mask

MAX_POSITIONS = 1 << 20
"""Maximum positions to check."""
KEYS_AHEAD = 8
"""Number of keys after the query to check; none may be visible."""
STRIDE = 4_099
"""Distance between the compared rows, besides those at the mask's edges."""

MaskFunction = Callable[..., torch.Tensor]


class UnknownMaskError(NotImplementedError):
    """The kernels do not support this type of mask."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys that a query at position p sees.

    Attributes:
        window: Length of the window: only keys in (p - window, p]; None: all up to p.
        chunk: Length of a chunk: only keys in the query's chunk; None: all.
    """

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """Return the first key that a query at `position` sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return position - position % self.chunk if self.chunk is not None else 0


FULL = Mask()


def recognize(function: MaskFunction, *, max_position: int, use_vmap: bool = False) -> Mask:
    """Evaluate a mask function on some rows and return its mask.

    Args:
        function: Takes (batch, head, query, key) indices; returns whether the key is visible.
        max_position: The model's context: the limit of checked positions.
        use_vmap: Whether the function does not broadcast.

    Raises:
        UnknownMaskError: The mask is neither full nor a window nor chunks, or depends on more than
            positions.
    """
    last = min(max_position, MAX_POSITIONS) - 1

    def first(query: int) -> int:
        try:
            row = sdpa_mask(
                batch_size=1,
                q_length=1,
                kv_length=query + 1 + KEYS_AHEAD,
                q_offset=query,
                mask_function=function,
                allow_is_causal_skip=False,
                use_vmap=use_vmap,
            )
        except (IndexError, RuntimeError) as error:
            raise UnknownMaskError("its mask depends on more than positions") from error
        assert row is not None
        visible = row.flatten().nonzero().flatten()
        if not len(visible) or int(visible[-1]) < query:
            raise UnknownMaskError("its mask hides a token from itself")
        if int(visible[-1]) > query:
            raise UnknownMaskError("its attention is not causal")
        if len(visible) != query + 1 - int(visible[0]):
            raise UnknownMaskError("its mask is neither full nor a window nor chunks")
        return int(visible[0])

    mask = _candidate(first, last)
    size = mask.window or mask.chunk or 1
    edges = {0, 1, 2, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, last}
    for query in sorted(edges | set(range(0, last, max(STRIDE, last // 16)))):
        if 0 <= query <= last and first(query) != mask.first(query):
            raise UnknownMaskError("its mask is neither full nor a window nor chunks")
    return mask


def _candidate(first: Callable[[int], int], last: int) -> Mask:
    """Return the only mask that matches the first row that does not see all keys."""
    if first(last) == 0:
        return FULL
    low, high = 0, last  # row `low` sees all, row `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first(middle) == 0 else (low, middle)
    return Mask(window=high) if first(high) == 1 else Mask(chunk=high)
