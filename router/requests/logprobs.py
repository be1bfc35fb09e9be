"""Log-probabilities of the tokens whose text the client receives."""

from collections import deque
from collections.abc import Iterator

from octavo.v1.sampling_pb2 import TokenLogprob

ELSEWHERE = -1
"""Offset of tokens that are not content, which cannot be part of a stop string."""


class HeldLogprobs:
    """Buffer of log-probabilities of tokens that may be part of a hidden stop string."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: deque[tuple[int, TokenLogprob]] = deque()

    def add(self, place: int, logprob: TokenLogprob) -> None:
        """Add a token's log-probability.

        Args:
            place: Offset of the token in content, in characters, or `ELSEWHERE`.
            logprob: The log-probability.
        """
        self._held.append((place, logprob))

    def before(self, end: int) -> Iterator[TokenLogprob]:
        """Remove and yield log-probabilities of tokens that begin before offset `end`."""
        while self._held and self._held[0][0] < end:
            yield self._held.popleft()[1]

    def rest(self) -> Iterator[TokenLogprob]:
        """Remove and yield all log-probabilities."""
        while self._held:
            yield self._held.popleft()[1]
