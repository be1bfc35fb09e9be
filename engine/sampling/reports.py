"""Log-probabilities that a step reports, on their way to the host."""

import math
from collections.abc import Sequence as Rows

import torch

from octavo.engine.scheduling.batch import Continuations
from octavo.engine.scheduling.sequence import TokenLogprob
from octavo.kernels.host_copies import AsyncCopy
from octavo.kernels.logits import score_tokens


class Report:
    """Log-probabilities of rows' tokens and of the most likely ones, on their way to the host.

    Args:
        logits: `[n, vocab_size]`, the model's unchanged logits.
        tokens: `[n]` int64, the token to report in each row.
        counts: `[n]`, number of the most likely tokens to report.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, counts: Rows[int]) -> None:
        self._counts = counts
        scores = score_tokens(logits, tokens, min(max(counts), logits.shape[1]))
        self._columns = [AsyncCopy(column) for column in (tokens, *scores)]

    def logprobs(self) -> list[TokenLogprob]:
        """Wait for them, and return one per row."""
        columns = (column.tolist() for column in self._columns)
        return [
            TokenLogprob(token, logprob, list(zip(ids[:count], values[:count], strict=True)))
            for count, token, logprob, ids, values in zip(self._counts, *columns, strict=True)
        ]


class Continued:
    """Beams' most likely next tokens, on their way to the host.

    Args:
        ids: Sequence ids of the beams.
        counts: `[len(ids)]`, number of tokens that each beam's search looks at.
        token_ids: `[len(ids), max(counts)]` int64, most likely first.
        logprobs: Their log-probabilities, in the same shape.
    """

    def __init__(
        self,
        ids: Rows[int],
        counts: Rows[int],
        token_ids: torch.Tensor,
        logprobs: torch.Tensor,
    ) -> None:
        self._ids = ids
        self._counts = counts
        self._columns = AsyncCopy(token_ids), AsyncCopy(logprobs)

    def collect(self) -> dict[int, Continuations]:
        """Wait for them; return tokens and log-probabilities by sequence id."""
        columns = (column.tolist() for column in self._columns)
        return {
            id_: [
                (token_id, value)
                for token_id, value in zip(ids[:count], values[:count], strict=True)
                if value > -math.inf  # a constraint may leave fewer
            ]
            for id_, count, ids, values in zip(self._ids, self._counts, *columns, strict=True)
        }
