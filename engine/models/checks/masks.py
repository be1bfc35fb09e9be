"""Recognises which keys a model's attention mask shows to a query.

transformers describes a mask as a function of (batch, head, query, key). Such a
function can be evaluated anywhere, so a window of 4,096 tokens is found without
a prompt of that length.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.masking_utils import sdpa_mask

LONGEST = 1 << 20
"""Positions that are looked at, at most."""
BEYOND = 8
"""Keys after the query that are looked at: none may be visible."""
STRIDE = 4_099
"""Distance of the rows that are compared besides those at the edges."""

MaskFunction = Callable[..., torch.Tensor]


class UnknownMaskError(NotImplementedError):
    """The mask is of a kind that the kernels do not have."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query at position p sees.

    Attributes:
        window: those in (p - window, p]; all up to p if None.
        chunk: of these, those since the last multiple of `chunk`; all if None.
    """

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """Return the first key that a query at `position` sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return position - position % self.chunk if self.chunk is not None else 0


FULL = Mask()


def recognise(function: MaskFunction, *, max_position: int, use_vmap: bool = False) -> Mask:
    """Evaluate a mask function on some of its rows and name what it does.

    Args:
        function: takes (batch, head, query, key) indices, returns whether the key is visible.
        max_position: positions that the model has; a mask is looked at up to there.
        use_vmap: the function does not broadcast.

    Returns:
        Mask: full, a window or chunks.

    Raises:
        UnknownMaskError: none of these, or one that depends on more than positions.
    """
    last = min(max_position, LONGEST) - 1

    def first(query: int) -> int:
        try:
            row = sdpa_mask(
                batch_size=1,
                q_length=1,
                kv_length=query + 1 + BEYOND,
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
    """Return the one mask that agrees at the first row that does not see all."""
    if first(last) == 0:
        return FULL
    low, high = 0, last  # row `low` sees all, row `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first(middle) == 0 else (low, middle)
    return Mask(window=high) if first(high) == 1 else Mask(chunk=high)
