"""A step that the device was given and may still be computing."""

from dataclasses import dataclass, field

import numpy as np
import torch

from octavo.engine.sampling.sampler import NO_TOKENS, PendingTokens
from octavo.engine.scheduling.batch import Batch, Continuations, SamplerOutput
from octavo.engine.scheduling.sequence import TokenLogprob
from octavo.kernels.host import to_device


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step. It keeps the sampled tokens' tensors alive until it is collected.

    Attributes:
        batch: what it computes.
        tokens: the tokens that it samples.
        continuations: as in `SamplerOutput`.
        prompt_logprobs: as in `SamplerOutput`.
    """

    batch: Batch
    tokens: PendingTokens = NO_TOKENS
    continuations: dict[int, Continuations] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)

    def collect(self) -> SamplerOutput:
        """Wait until the step is computed and return its output."""
        steady, tokens = self.tokens.collect()
        return SamplerOutput(steady, tokens, self.continuations, self.prompt_logprobs)

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
