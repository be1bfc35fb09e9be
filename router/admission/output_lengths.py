"""How many tokens an output will have, learned from those that have ended.

The estimator is that of the Past-Future scheduler (Gong et al., ASPLOS 2025):
the lengths of late outputs are the distribution of those to come, and one that
has had `k` tokens is drawn from the part above `k`.
"""

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

SAFE = 0.8
"""The quantile that memory is set aside for: four outputs of five need no more."""
LIKELY = 0.5
"""The quantile by which a deadline is judged: as likely met as not."""
WINDOW = 512
"""Lengths kept, the newest."""
ENOUGH = 16
"""Fewer lengths than this tell nothing."""
UNKNOWN = 256
"""Tokens that an output is taken to have where nothing is known."""


@dataclass(slots=True)
class _Lengths:
    by_age: deque[int] = field(default_factory=deque)
    by_size: list[int] = field(default_factory=list)

    def add(self, length: int) -> None:
        if len(self.by_age) == WINDOW:
            oldest = self.by_age.popleft()
            del self.by_size[bisect_right(self.by_size, oldest) - 1]
        self.by_age.append(length)
        insort(self.by_size, length)


class OutputLengths:
    """The lengths of one model's late outputs, apart by the power of two of their limit.

    Apart, because an output that its limit cut tells nothing of one with a
    larger limit, and because those who ask for 16 tokens and those who ask for
    2,000 want different things.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Lengths] = {}

    def add(self, length: int, max_tokens: int) -> None:
        """Notes the length of an output that ended of itself."""
        self._known.setdefault(max_tokens.bit_length(), _Lengths()).add(length)

    def expected(
        self, max_tokens: int, *, min_tokens: int = 0, drawn: int = 0, quantile: float = SAFE
    ) -> int:
        """Returns the length that an output will have in the end.

        Args:
            max_tokens: Its limit.
            min_tokens: Its least length.
            drawn: Tokens that it has.
            quantile: The share of outputs that are to be no longer than what is
                returned, of those that get as far as this one.
        """
        known = self._known.get(max_tokens.bit_length())
        if known is None or len(known.by_age) < ENOUGH:
            length = max(UNKNOWN, 2 * drawn)
        else:
            shorter = bisect_right(known.by_size, max(drawn, min_tokens - 1))
            longer = len(known.by_size) - shorter
            # Longer than all before it: as far again, for want of a better guess.
            length = known.by_size[shorter + int(quantile * longer)] if longer else 2 * drawn
        return min(max(length, min_tokens, drawn + 1), max_tokens)
