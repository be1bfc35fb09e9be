"""Log-probabilities of the tokens whose text a client gets."""

from collections import deque
from collections.abc import Iterator

from octavo.v1.sampling_pb2 import TokenLogprob

ELSEWHERE = -1
"""The place of tokens that are no content: a stop string cannot be in them."""


class HeldLogprobs:
    """Holds back log-probabilities of tokens whose text may be a hidden stop string's."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: deque[tuple[int, TokenLogprob]] = deque()

    def add(self, place: int, logprob: TokenLogprob) -> None:
        """Take a token's log-probability.

        Args:
            place: The characters of content before the token, or `ELSEWHERE`.
            logprob: The log-probability.
        """
        self._held.append((place, logprob))

    def before(self, end: int) -> Iterator[TokenLogprob]:
        """Take out those of tokens that begin before `end` characters of content."""
        while self._held and self._held[0][0] < end:
            yield self._held.popleft()[1]

    def rest(self) -> Iterator[TokenLogprob]:
        """Take out all of them."""
        while self._held:
            yield self._held.popleft()[1]
