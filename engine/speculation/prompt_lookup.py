"""Prompt lookup: drafts the tokens after an earlier occurrence of the last tokens.

This is "Prompt Lookup Decoding" (Saxena, 2023), with the longest match, not a fixed length.
"""

import numpy as np

from octavo.engine.speculation.history import History
from octavo.engine.speculation.matches import find_matches
from octavo.engine.speculation.method import Method

SHORTEST = 2
"""Minimum length of a match."""


class PromptLookup(Method):
    """Drafts the tokens after the latest of the longest matches."""

    def draft(self, history: History, most: int) -> list[int]:
        """See `Method`. A match that overlaps the end is a repetition: the draft continues it."""
        tokens = history.tokens
        matches = find_matches(tokens)
        if matches.length < SHORTEST:
            return []
        following: list[int] = np.resize(tokens[matches.ends[-1] :], most).tolist()
        return following

    def learn(self, history: History) -> None:
        """Ignore an output that ended: only a sequence's own tokens are looked up."""
