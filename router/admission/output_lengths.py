"""Predict an output's length from recent outputs.

The estimator is that of the Past-Future scheduler (Gong et al., ASPLOS 2025): future outputs have
the length distribution of recent ones, and an output with `k` tokens has that distribution's part
above `k`.
"""

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Sequence

SAFE_QUANTILE = 0.8
"""Quantile of output lengths to reserve memory for: four of five outputs need no more."""
RECENT_OUTPUTS = 512
"""Number of recent lengths that are kept."""
MIN_SAMPLES = 8
"""Minimum number of samples for an estimate, of lengths or times."""
DEFAULT_LENGTH = 256
"""Expected length of an output until there are enough samples."""


class OutputLengths:
    """Lengths of one model's recent outputs, grouped by max_tokens (powers of two).

    They are grouped because a truncated output says little about one with a larger limit, and
    because requests for 16 tokens and for 2,000 differ in purpose.
    """

    def __init__(self) -> None:
        self._by_age: defaultdict[int, deque[int]] = defaultdict(deque)
        self._by_size: defaultdict[int, list[int]] = defaultdict(list)

    def add(self, length: int, max_tokens: int) -> None:
        """Add the length of an ended output."""
        group = max_tokens.bit_length()
        by_age, by_size = self._by_age[group], self._by_size[group]
        if len(by_age) == RECENT_OUTPUTS:
            del by_size[bisect_right(by_size, by_age.popleft()) - 1]
        by_age.append(length)
        insort(by_size, length)

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
            max_tokens: The output's limit.
            min_tokens: The output's minimum length.
            sampled: Tokens of the output so far.
            quantile: Quantile to return, among outputs that get at least this far.
        """
        known: Sequence[int] = self._by_size.get(max_tokens.bit_length(), ())
        if len(known) < MIN_SAMPLES:
            length = max(DEFAULT_LENGTH, 2 * sampled)
        else:
            shorter = bisect_right(known, max(sampled, min_tokens - 1))
            longer = len(known) - shorter
            # Longer than all samples: guess that it will double.
            length = known[shorter + int(quantile * longer)] if longer else 2 * sampled
        return min(max(length, min_tokens, sampled + 1), max_tokens)
