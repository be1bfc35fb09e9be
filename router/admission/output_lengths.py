"""Predict how many tokens an output will have from the outputs that have ended.

The estimator is that of the Past-Future scheduler (Gong et al., ASPLOS 2025):
the lengths of recent outputs are the distribution of future ones, and an output that
has `k` tokens is sampled from the part above `k`.
"""

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

SAFE_QUANTILE = 0.8
"""Quantile of output lengths that memory is reserved for: four outputs of five need no more."""
RECENT_OUTPUTS = 512
"""Number of newest lengths kept."""
MIN_SAMPLES = 8
"""Number of samples from which anything is estimated, lengths and times alike."""
DEFAULT_LENGTH = 256
"""Expected tokens of an output while there are fewer samples."""


@dataclass(slots=True)
class _Lengths:
    by_age: deque[int] = field(default_factory=deque)
    by_size: list[int] = field(default_factory=list)

    def add(self, length: int) -> None:
        if len(self.by_age) == RECENT_OUTPUTS:
            oldest = self.by_age.popleft()
            del self.by_size[bisect_right(self.by_size, oldest) - 1]
        self.by_age.append(length)
        insort(self.by_size, length)


class OutputLengths:
    """The lengths of one model's recent outputs, grouped by the power of two of their limit.

    Grouped, because an output that its limit cut is no sample of one with a
    larger limit, and because those who ask for 16 tokens and those who ask for
    2,000 want different things.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Lengths] = {}

    def add(self, length: int, max_tokens: int) -> None:
        """Add the length of an output that ended by itself."""
        self._known.setdefault(max_tokens.bit_length(), _Lengths()).add(length)

    def expected(
        self,
        max_tokens: int,
        *,
        min_tokens: int = 0,
        sampled: int = 0,
        quantile: float = SAFE_QUANTILE,
    ) -> int:
        """Return the expected length of an output.

        Args:
            max_tokens: Its limit.
            min_tokens: Its minimum length.
            sampled: Tokens that it has.
            quantile: The share of outputs that are to be no longer than what is
                returned, of those that get as far as this one.
        """
        known = self._known.get(max_tokens.bit_length())
        if known is None or len(known.by_age) < MIN_SAMPLES:
            length = max(DEFAULT_LENGTH, 2 * sampled)
        else:
            shorter = bisect_right(known.by_size, max(sampled, min_tokens - 1))
            longer = len(known.by_size) - shorter
            # Longer than all before it: as far again, for want of a better guess.
            length = known.by_size[shorter + int(quantile * longer)] if longer else 2 * sampled
        return min(max(length, min_tokens, sampled + 1), max_tokens)
