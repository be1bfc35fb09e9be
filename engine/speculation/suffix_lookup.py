"""Suffix lookup: drafts the most frequent continuation of the last tokens, here or in old outputs.

As in SuffixDecoding (Oliaro et al., 2024), the draft is the continuation of an earlier copy of the
sequence's longest repeated suffix; the longer the match, the longer the draft. The paper uses
suffix trees. Here an index of all 3-grams gives the candidates, and array operations compare them:
it takes microseconds, and two numbers per stored token. Without a match, a sequence that copied
before most likely continues near the place it copied from.
"""

from array import array
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from octavo.engine.speculation.alignment import Tokens
from octavo.engine.speculation.history import History
from octavo.engine.speculation.matches import (
    FEW,
    LONGEST,
    NOWHERE,
    Matches,
    find_matches,
    longest_of,
)
from octavo.engine.speculation.method import Method

SHORTEST = 2
"""Minimum length of a match in the sequence itself."""
INDEXED = 3
"""Minimum length of a match in earlier outputs, and length of their index's keys."""
DRAFTED_PER_MATCHED = 4
"""Maximum drafted tokens per matching token."""
MIN_SHARE = 0.5
"""Minimum share of the candidates that must continue with a drafted token."""
KEPT_TOKENS = 1 << 18
"""Maximum stored tokens of earlier outputs, over all salts."""
PART = KEPT_TOKENS // 4
"""Tokens per part; the oldest part is dropped as a whole."""
END = -1
"""Separator after each stored output; no token has this id."""


class IndexedOutputs:
    """Earlier outputs, concatenated, and an index of their 3-grams."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._earlier = array("i")  # previous place of the same 3-gram, -1 for none
        self._latest: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Tokens:
        """`[n]` int32; do not keep this view, as the part cannot grow while it exists."""
        return np.frombuffer(self._tokens, np.int32)

    def add(self, output: list[int]) -> None:
        """Append an output."""
        for i, token in enumerate(output):
            self._tokens.append(token)
            if i + 1 < INDEXED:
                self._earlier.append(END)
                continue
            key = tuple(output[i + 1 - INDEXED : i + 1])
            self._earlier.append(self._latest.get(key, END))
            self._latest[key] = len(self._tokens) - 1
        self._tokens.append(END)
        self._earlier.append(END)

    def find(self, tail: Tokens) -> Matches:
        """Find the places with the longest match of a sequence's last tokens."""
        place = self._latest.get(tuple(tail[-INDEXED:].tolist()), END)
        ends: list[int] = []
        while place != END and len(ends) < FEW:
            ends.append(place + 1)
            place = self._earlier[place]
        if not ends:
            return NOWHERE
        return longest_of(self.tokens, np.array(ends[::-1]), tail, INDEXED)


class SuffixLookup(Method):
    """Drafts from a sequence's own tokens and from earlier outputs of its salt."""

    def __init__(self) -> None:
        self._parts: OrderedDict[str, list[IndexedOutputs]] = OrderedDict()  # the latest salt last

    def draft(self, history: History, most: int) -> list[int]:
        """See `Method`."""
        tokens = history.tokens
        history.alignment.drafted = False
        best, where = find_matches(tokens), tokens
        if best.length < SHORTEST:
            best = NOWHERE
        if len(tokens) >= INDEXED:
            for part in reversed(self._parts.get(history.salt, ())):
                matches = part.find(tokens[-LONGEST:])
                if matches.length > best.length:
                    best, where = matches, part.tokens
        if not best.length:
            return history.alignment.draft(tokens, most)
        if where is tokens:
            history.alignment.match(int(best.ends[-1]), len(tokens))
        return _most_frequent(where, best.ends, min(most, DRAFTED_PER_MATCHED * best.length))

    def learn(self, history: History) -> None:
        """Store an output that ended; if there are too many, drop the least recently used."""
        output = history.output.tolist()
        parts = self._parts.setdefault(history.salt, [IndexedOutputs()])
        self._parts.move_to_end(history.salt)
        if len(parts[-1]) >= PART:
            parts.append(IndexedOutputs())
        parts[-1].add(output)
        while sum(len(part) for each in self._parts.values() for part in each) > KEPT_TOKENS:
            salt, oldest = next(iter(self._parts.items()))
            del oldest[0]
            if not oldest:
                del self._parts[salt]


def _most_frequent(tokens: Tokens, ends: NDArray[np.int64], most: int) -> list[int]:
    """Return the most frequent continuation of some places, token by token, the latest on a tie.

    Args:
        tokens: `[n]` int32.
        ends: `[m]` int64, one past each place, ascending.
        most: Maximum tokens to return.
    """
    # For a few short lists, Python's own operations are faster than numpy's.
    paths = [tokens[end : end + most].tolist() for end in ends[::-1].tolist()]
    draft: list[int] = []
    while len(draft) < most:
        following = [path[len(draft)] for path in paths if len(path) > len(draft)]
        if not following:
            break
        best = max(following, key=following.count)
        if best == END or following.count(best) < MIN_SHARE * len(following):
            break
        paths = [path for path in paths if path[len(draft) : len(draft) + 1] == [best]]
        draft.append(best)
    return draft
