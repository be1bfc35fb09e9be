"""Follows one output's tokens through its grammar, and finds the allowed next tokens."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from octavo.engine.constraints.grammar import shorten
from octavo.engine.speculation.method import NO_GUESS, Guess

WORD_BITS = 32
QUICK_SECONDS = 0.001
"""Maximum seconds of a matcher's last mask for steps to wait for its next."""
DRAFT_SECONDS = 0.001
"""Processor seconds after which drafting stops: a step waits for drafts too."""


@dataclass(frozen=True, slots=True)
class EndRule:
    """The rule for tokens that end an output, besides the grammar.

    They are always allowed where the grammar allows nothing else.

    Attributes:
        min_tokens: Minimum tokens of an output that ends.
        early: Tokens that `min_tokens` forbids.
        never: Tokens that the client does not allow at all.
    """

    min_tokens: int = 0
    early: frozenset[int] = frozenset()
    never: frozenset[int] = frozenset()

    def forbidden(self, length: int) -> Collection[int]:
        """Return the end tokens that may not follow an output of `length` tokens."""
        return self.never | self.early if length < self.min_tokens else self.never


class Matcher:
    """The state of one output in its grammar.

    One thread at a time may use it: `advance` runs in a different thread, while `ready` is false.

    Attributes:
        ready: Whether `mask` is the next token's.
        mask: `[words]` int32: bit `i % 32` of word `i // 32` is 1 if token i may be next.
        draft: Possible next tokens: those that the grammar forces, or the guess as far as the
            grammar allows it.
        draft_masks: The mask after each drafted token.
        error: The reason why the grammar cannot go on, or None.
        seconds: Seconds of the last mask; after a slow mask it decays.
    """

    def __init__(self, state: LLMatcher, words: int, rule: EndRule) -> None:
        self._state = state
        self._rule = rule
        self._length = 0  # tokens that the state has read
        self.ready = False
        self.awaited = False
        self.mask = np.empty(words, np.int32)
        self.draft: list[int] = []
        self.draft_masks: list[np.ndarray] = []
        self.error: str | None = None
        self.seconds = 0.0

    @property
    def quick(self) -> bool:
        """Whether its masks are quick enough for steps to wait for them."""
        return self.seconds < QUICK_SECONDS

    @property
    def length(self) -> int:
        """Number of the output's tokens that it has read."""
        return self._length

    def copy(self) -> "Matcher":
        """Return the matcher of an output with the same tokens, without a draft."""
        fork = Matcher(self._state.deep_copy(), len(self.mask), self._rule)
        fork._length = self._length
        fork.ready = self.ready
        fork.mask[:] = self.mask
        fork.error = self.error
        fork.seconds = self.seconds
        return fork

    def advance(self, token_ids: Sequence[int], guess: Guess = NO_GUESS) -> None:
        """Read an output's next tokens, compute the mask after them, and draft what follows.

        It never raises; it sets `ready` or `error` last.

        Args:
            token_ids: The tokens after those already read.
            guess: The tokens to draft.
        """
        began = time.thread_time()
        try:
            error = self._advance(list(token_ids))
            self.seconds = max(time.thread_time() - began, self.seconds / 2)
            self.draft, self.draft_masks = [], []
            if error is None and guess.most > 0 and self.quick:
                error = self._draft(guess)
        except Exception as failure:  # noqa: BLE001 - the library's: the request fails
            error = str(failure)
        self.error = error
        self.ready = error is None

    def _advance(self, token_ids: list[int]) -> str | None:
        state = self._state
        if token_ids and not state.consume_tokens(token_ids):
            return shorten(state.get_error()) or "the tokens do not keep to it"
        self._length += len(token_ids)
        self.mask = self._compute_mask(self._length)
        if state.is_error():
            return shorten(state.get_error())
        if not self.mask.any():
            return "no token of the model continues the output"
        return None

    def _compute_mask(self, length: int) -> np.ndarray:
        """Return the next token's mask after an output of `length` tokens, all read."""
        mask = np.empty_like(self.mask)
        self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        for_end = self._rule.forbidden(length)
        return _without(mask, for_end) if for_end else mask

    def _draft(self, guess: Guess) -> str | None:
        """Draft tokens and compute the mask after each; return the error, if any.

        The draft is the tokens that the grammar forces, or the guess if the grammar allows more of
        it. Forced tokens may be wrong, as the model may spell the same text in other tokens. A
        token that ends the output is not drafted.
        """
        state, mask, until = self._state, self.mask, time.thread_time() + DRAFT_SECONDS
        guessed = list(guess.token_ids)
        guessed = guessed[: state.validate_tokens(guessed)]
        for token_id in max(guessed, state.compute_ff_tokens(), key=len)[: guess.most]:
            if not _allows(mask, token_id) or time.thread_time() > until:
                break
            if state.try_consume_tokens([token_id]) != 1:
                break
            mask = self._compute_mask(self._length + len(self.draft) + 1)
            if state.is_stopped() or not mask.any():
                state.rollback(1)
                break
            self.draft.append(token_id)
            self.draft_masks.append(mask)
        if self.draft:
            state.rollback(len(self.draft))
        return shorten(state.get_error()) if state.is_error() else None


def _allows(mask: np.ndarray, token_id: int) -> bool:
    """Return whether a mask allows a token."""
    word, bit = divmod(token_id, WORD_BITS)
    return word < len(mask) and bool((int(mask[word]) >> bit) & 1)


def _without(mask: np.ndarray, token_ids: Collection[int]) -> np.ndarray:
    """Return a mask that also forbids some tokens; the mask itself if it allows no others."""
    kept = mask.copy()
    bits = kept.view(np.uint32)
    for token_id in token_ids:
        word, bit = divmod(token_id, WORD_BITS)
        bits[word] &= np.uint32(~(1 << bit) & 0xFFFFFFFF)
    return kept if kept.any() else mask
