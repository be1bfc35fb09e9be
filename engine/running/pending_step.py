"""A step that the device was given and may still be computing."""

from dataclasses import dataclass, field

import numpy as np
import torch

from octavo.engine.sampling.sampler import NO_TOKENS, PendingContinuations, PendingTokens, Report
from octavo.engine.scheduling.batch import Batch, SamplerOutput
from octavo.kernels.host import to_device


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step. It keeps the sampled tokens' tensors alive until it is collected.

    Attributes:
        batch: what it computes.
        tokens: the tokens that it samples.
        continuations: of its beams, if it has any.
        scores: its prompt log-probabilities, in parts, by index in the batch.
    """

    batch: Batch
    tokens: PendingTokens = NO_TOKENS
    continuations: PendingContinuations | None = None
    scores: dict[int, list[Report]] = field(default_factory=dict)

    def collect(self) -> SamplerOutput:
        """Wait until the step is computed and return its output."""
        steady, tokens = self.tokens.collect()
        continuations = self.continuations.collect() if self.continuations is not None else {}
        scores = {
            i: [score for report in reports for score in report.logprobs()]
            for i, reports in self.scores.items()
        }
        return SamplerOutput(steady, tokens, continuations, scores)

    def fill_placeholders(self, batch: Batch, token_ids: torch.Tensor) -> None:
        """Put the tokens that this step samples into the inputs of the step after it.

        The device does it, so the host need not wait for the tokens.

        Args:
            batch: what the step after it computes.
            token_ids: `[1, num_tokens]`, that step's tokens, changed in place where they are
                placeholders.
        """
        row_of = {sequence.id: i for i, sequence in enumerate(self.tokens.sequences)}
        steady, end = batch.steady.sequences, len(batch.steady)
        places = [i for i, sequence in enumerate(steady) if sequence.num_placeholders]
        rows = [row_of[steady[i].id] for i in places]
        for scheduled in batch.ruled:
            end += scheduled.end - scheduled.start
            if scheduled.end - len(scheduled.draft) > scheduled.sequence.num_known:
                places.append(end - 1)
                rows.append(row_of[scheduled.sequence.id])
        if places:
            device = token_ids.device
            where, which = (to_device(np.array(each, np.int64), device) for each in (places, rows))
            token_ids[0].index_copy_(0, where, self.tokens.token_ids.index_select(0, which))
