"""The tokens of one sequence as an array that grows with it."""

import numpy as np

from octavo.engine.speculation.alignment import Alignment, Tokens


class History:
    """A sequence's known prompt and output tokens.

    Attributes:
        num_prompt: Number of prompt tokens.
        salt: Salt; only sequences with the same salt get drafts from this one's output.
        alignment: The place that the sequence copies from.
    """

    def __init__(self, num_prompt: int, salt: str = "") -> None:
        self.num_prompt = num_prompt
        self.salt = salt
        self.alignment = Alignment()
        self._tokens = np.empty(0, np.int32)
        self._length = 0

    def update(self, token_ids: list[int]) -> None:
        """Append the new tokens at the end of `token_ids`, the whole sequence."""
        length = len(token_ids)
        if length > len(self._tokens):
            grown = np.empty(max(64, length + length // 2), np.int32)
            grown[: self._length] = self.tokens
            self._tokens = grown
        self._tokens[self._length : length] = token_ids[self._length :]
        self._length = length

    @property
    def tokens(self) -> Tokens:
        """`[n]` int32: prompt and output."""
        return self._tokens[: self._length]

    @property
    def output(self) -> Tokens:
        """`[n]` int32: the output alone."""
        return self.tokens[self.num_prompt :]
