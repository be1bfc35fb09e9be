"""Chooses how a preempted group gives up its blocks: swapped out or recomputed."""

from typing import Literal

PreemptionMode = Literal["auto", "swap", "recompute"]

_SMOOTHING = 0.1


class PreemptionPolicy:
    """Compares the costs of both from measured rates.

    The cheaper one depends on the machine: in section 7.3 of the PagedAttention paper, recomputing
    takes at most 1.2 times as long as swapping, and swapping costs much more with small blocks,
    whose copies are short. So this class measures the rates.

    Swapping copies a group's blocks twice; recomputing runs its tokens through the model again.
    `auto` swaps until both rates are measured.
    """

    def __init__(self, mode: PreemptionMode) -> None:
        self.mode = mode
        self._seconds_per_block: float | None = None
        self._seconds_per_token: float | None = None

    def observe_transfer(self, blocks: int, seconds: float) -> None:
        """Update the rate of copies from a swap of `blocks` blocks."""
        self._seconds_per_block = _smooth(self._seconds_per_block, seconds / blocks)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Update the rate of prefill from a step of `tokens` tokens, most of them prefill."""
        self._seconds_per_token = _smooth(self._seconds_per_token, seconds / tokens)

    def prefill_seconds(self, tokens: int) -> float | None:
        """Return the time that computing `tokens` tokens takes; None if it is not known yet."""
        return None if self._seconds_per_token is None else tokens * self._seconds_per_token

    def prefers_swap(self, *, blocks: int, tokens: int) -> bool:
        """Return whether to swap a group of `blocks` blocks and `tokens` computed tokens."""
        if self.mode != "auto":
            return self.mode == "swap"
        if self._seconds_per_block is None or self._seconds_per_token is None:
            return True
        return 2 * blocks * self._seconds_per_block <= tokens * self._seconds_per_token


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
