"""A step that was given to the device and may not be done."""

from dataclasses import dataclass, field

import numpy as np
import torch

from octavo.engine.sampling.sampler import Sampled
from octavo.engine.scheduling.batch import Batch, Continuations, Draw, StepResult
from octavo.engine.scheduling.sequence import Sequence, TokenLogprob
from octavo.kernels.host import to_device


@dataclass(frozen=True, slots=True)
class Launched:
    """What a step computes.

    Attributes:
        drawn: its tokens: known, or on their way.
        continuations: as in `StepResult`.
        prompt_logprobs: likewise.
    """

    drawn: Sampled | list[Draw] = field(default_factory=list)
    continuations: dict[int, Continuations] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)

    def result(self) -> StepResult:
        """Waits until it is done."""
        draws = self.drawn if isinstance(self.drawn, list) else self.drawn.draws()
        return StepResult(draws, self.continuations, self.prompt_logprobs)

    def fill_in(self, batch: Batch, token_ids: torch.Tensor) -> None:
        """Puts the tokens that this step draws into the one launched after it.

        Args:
            batch: what that one computes.
            token_ids: `[1, num_tokens]`, its tokens, changed in place where a sequence's is
                being drawn.
        """
        row_of = {sequence.id: row for row, sequence in enumerate(self._sequences)}
        places, rows, end = [], [], 0
        for part in batch.slices:
            end += part.end - part.start
            if part.end > part.sequence.num_known:
                places.append(end - 1)
                rows.append(row_of[part.sequence.id])
        if places:
            device = token_ids.device
            where, which = (to_device(np.array(each, np.int64), device) for each in (places, rows))
            token_ids[0].index_copy_(0, where, self._tokens.index_select(0, which))

    @property
    def _sequences(self) -> list[Sequence]:
        """Whose each of the tokens is."""
        if isinstance(self.drawn, list):
            return [draw.sequence for draw in self.drawn]
        return [drawer.sequence for drawer in self.drawn.drawers]

    @property
    def _tokens(self) -> torch.Tensor:
        if isinstance(self.drawn, list):
            return torch.tensor([draw.token_id for draw in self.drawn])
        return self.drawn.tokens
