"""Follow one output's tokens through its grammar, and find the tokens that may come next."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from octavo.engine.constraints.grammar import shorten

WORD_BITS = 32
QUICK_SECONDS = 0.001
"""A step waits for the masks of matchers whose last ones took less."""


@dataclass(frozen=True, slots=True)
class EndRule:
    """When the tokens that end an output are allowed, besides where the grammar does.

    They are always allowed where the grammar has nothing else.

    Attributes:
        min_tokens: Not before the output has this many tokens.
        early: Tokens that `min_tokens` forbids.
        never: Tokens that the client does not want at all.
    """

    min_tokens: int = 0
    early: frozenset[int] = frozenset()
    never: frozenset[int] = frozenset()

    def forbidden(self, length: int) -> Collection[int]:
        """Return the tokens that may not follow an output of `length` tokens."""
        return self.never | self.early if length < self.min_tokens else self.never


class Matcher:
    """The state of one output in its grammar.

    One thread at a time may use it: `advance` runs in another one than the rest, while `ready` is
    false.

    Attributes:
        ready: Whether `mask` is that of the next token.
        mask: `[words]` int32: bit `i % 32` of word `i // 32` says whether token i may be next.
        error: Why the grammar cannot go on, or None.
        seconds: How long the mask took; after a slow one it decays.
    """

    def __init__(self, state: LLMatcher, words: int, rule: EndRule) -> None:
        self._state = state
        self._rule = rule
        self._length = 0  # tokens that the state has read
        self.ready = False
        self.awaited = False
        self.mask = np.empty(words, np.int32)
        self.error: str | None = None
        self.seconds = 0.0

    @property
    def quick(self) -> bool:
        """Whether its masks take so little time that a step can wait for them."""
        return self.seconds < QUICK_SECONDS

    @property
    def length(self) -> int:
        """Tokens of the output that it has read."""
        return self._length

    def copy(self) -> "Matcher":
        """Return the matcher of an output with the same tokens."""
        fork = Matcher(self._state.deep_copy(), len(self.mask), self._rule)
        fork._length = self._length
        fork.ready = self.ready
        fork.mask[:] = self.mask
        fork.error = self.error
        fork.seconds = self.seconds
        return fork

    def advance(self, token_ids: Sequence[int]) -> None:
        """Read an output's next tokens and compute the mask after them.

        It never raises; `ready` or `error` is set last.

        Args:
            token_ids: The tokens after those that were read.
        """
        began = time.thread_time()
        try:
            error = self._advance(list(token_ids))
        except Exception as failure:  # noqa: BLE001 - the library's: the request fails by it
            error = str(failure)
        self.seconds = max(time.thread_time() - began, self.seconds / 2)
        self.error = error
        self.ready = error is None

    def _advance(self, token_ids: list[int]) -> str | None:
        state = self._state
        if token_ids and not state.consume_tokens(token_ids):
            return shorten(state.get_error()) or "the tokens do not keep to it"
        self._length += len(token_ids)
        state.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        if state.is_error():
            return shorten(state.get_error())
        for_end = self._rule.forbidden(self._length)
        if for_end:
            self._forbid(for_end)
        if not self.mask.any():
            return "no token of the model continues the output"
        return None

    def _forbid(self, token_ids: Collection[int]) -> None:
        """Take tokens out of the mask, unless it has no others."""
        kept = self.mask.copy()
        bits = kept.view(np.uint32)
        for token_id in token_ids:
            word, bit = divmod(token_id, WORD_BITS)
            bits[word] &= np.uint32(~(1 << bit) & 0xFFFFFFFF)
        if kept.any():
            self.mask = kept
