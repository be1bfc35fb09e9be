"""Drafts the known tokens of an earlier run."""

import random

from octavo.engine.speculation.method import Method


class Oracle(Method):
    """Drafts tokens of a run without drafts; a third of the drafts end with a mistake.

    Args:
        outputs: Each sequence's tokens, its prompt first; no two have the same prompt.
    """

    def __init__(self, outputs):
        self._outputs = outputs
        self._rng = random.Random(1)

    def draft(self, history, most):
        tokens = history.tokens.tolist()
        (whole,) = (known for known in self._outputs if known[: len(tokens)] == tokens)
        draft = whole[len(tokens) :][: self._rng.randint(0, most)]
        if draft and self._rng.random() < 1 / 3:
            draft[-1] ^= 1
        return draft

    def learn(self, history):
        """It can draft for all sequences."""
