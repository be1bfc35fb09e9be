"""Beam search: which hypotheses continue, which are finished, and when it ends.

This file keeps only scores; `fork_beams.py` forks and frees the blocks. The rules are those of
transformers' `generate(num_beams=...)`, so outputs and scores are the same: a hypothesis' score is
the sum of its tokens' natural-log probabilities divided by its length, including the
end-of-sequence token, to the power of `length_penalty`.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.engine.scheduling.request import BeamSearch


class Candidate(NamedTuple):
    """A running beam and one more token.

    Attributes:
        score: The sum of log-probabilities, including the token's.
        beam: Index of the beam among the running ones.
        token_id: The token.
    """

    score: float
    beam: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output.

    Attributes:
        score: Score, normalised by its length.
        token_ids: Tokens, without the prompt.
    """

    score: float
    token_ids: list[int]


@dataclass(slots=True)
class BeamState:
    """One search.

    Attributes:
        params: Parameters of the request.
        scores: Scores of the running beams, in the order of the group's sequences.
        hypotheses: The best finished hypotheses, best first; at most `params.width`.
    """

    params: BeamSearch
    scores: list[float] = field(default_factory=lambda: [0.0])
    hypotheses: list[Hypothesis] = field(default_factory=list)

    def candidates_for(self, num_stopping: int) -> int:
        """Return the number of candidates needed: enough to continue if the best all end."""
        return max(2, 1 + num_stopping) * self.params.width

    def advance(
        self,
        outputs: list[list[int]],
        continuations: list[list[tuple[int, float]]],
        *,
        stopping: Collection[int],
        max_tokens: int,
    ) -> list[Candidate]:
        """Advance the search by one token.

        Args:
            outputs: Each running beam's tokens so far, without the prompt.
            continuations: Each running beam's most likely next tokens with
                their log-probabilities, `candidates_for` of them.
            stopping: Tokens that finish a hypothesis.
            max_tokens: The length at which every hypothesis is finished.

        Returns:
            The beams to continue, best first; empty when the search ends.
        """
        length = len(outputs[0]) + 1
        ranked = sorted(
            (
                Candidate(score + logprob, beam, token)
                for beam, (score, tokens) in enumerate(zip(self.scores, continuations, strict=True))
                for token, logprob in tokens
            ),
            key=lambda candidate: -candidate.score,
        )[: self.candidates_for(len(stopping))]
        ends = length >= max_tokens
        norm = length**self.params.length_penalty
        self._finish(
            [
                Hypothesis(c.score / norm, [*outputs[c.beam], c.token_id])
                for c in ranked[: self.params.width]
                if ends or c.token_id in stopping
            ]
        )
        running = [c for c in ranked if not ends and c.token_id not in stopping]
        running = running[: self.params.width]
        self.scores = [candidate.score for candidate in running]
        return [] if self._over(length) else running

    def _finish(self, finished: list[Hypothesis]) -> None:
        """Keep the best `width` finished hypotheses; with early stopping a full list is final."""
        if self._full and self.params.early_stopping:
            return
        merged = sorted([*self.hypotheses, *finished], key=lambda hypothesis: -hypothesis.score)
        self.hypotheses = merged[: self.params.width]

    @property
    def _full(self) -> bool:
        return len(self.hypotheses) == self.params.width

    def _over(self, length: int) -> bool:
        """Return whether no beam runs, or no running beam can beat the finished ones."""
        if not self.scores:
            return True
        if not self._full:
            return False
        best = self.scores[0] / length**self.params.length_penalty
        return self.params.early_stopping or best <= self.hypotheses[-1].score
