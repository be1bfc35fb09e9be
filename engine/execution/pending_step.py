"""A launched step that the device may still be computing."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch

from octavo.engine.execution.inputs import StepInputs
from octavo.engine.sampling.reports import Continued, Report
from octavo.engine.scheduling.batch import Batch, Samples
from octavo.engine.scheduling.sequence import SequenceGroup
from octavo.kernels.host_copies import AsyncCopy, to_device


@dataclass(slots=True)
class PendingStep:
    """A step from its launch until it is collected.

    First it holds the inputs of sampling: `inputs` and `logits`, or `greatest` and `late`; with
    several ranks `columns`, of which `sample` makes one of these.
    `set_tokens` drops these, since logits take much memory.

    Attributes:
        batch: The step's batch.
        inputs: The model's inputs; None for a batch that only copies blocks.
        logits: `[num_rows, vocab_size]`; None if the model gave tokens.
        columns: This rank's columns of logits; None without other ranks.
        greatest: The most likely token of each row of logits, if the model sampled itself.
        late: Ids of the sequences whose masks were not ready when the model sampled: their tokens
            are wrong.
        samples: The sequences that get tokens.
        token_ids: `[len(samples)]` int64, kept alive until the next step has read them.
    """

    batch: Batch
    inputs: StepInputs | None = None
    logits: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    greatest: list[int] | None = None
    late: Collection[int] = ()
    samples: Samples = field(default_factory=Samples)
    token_ids: torch.Tensor | None = None
    _arriving: AsyncCopy | None = None
    _reports: tuple[list[int], Report] | None = None
    _continued: Continued | None = None
    _scores: list[tuple[SequenceGroup, list[Report]]] = field(default_factory=list)

    def set_tokens(
        self,
        samples: Samples,
        token_ids: torch.Tensor,
        reports: tuple[list[int], Report] | None = None,
        *,
        continued: Continued | None = None,
        scores: list[tuple[SequenceGroup, list[Report]]] | None = None,
    ) -> None:
        """Set the sampled tokens, which may still be on their way to the host.

        Args:
            samples: The sequences.
            token_ids: Their tokens.
            reports: Log-probabilities, with the indices of their tokens.
            continued: The most likely next tokens of its beams, if any.
            scores: Prompt log-probabilities of groups, in parts.
        """
        self.inputs = self.logits = self.columns = self.greatest = None
        self.samples, self.token_ids = samples, token_ids
        self._arriving = AsyncCopy(token_ids)
        self._reports, self._continued = reports, continued
        self._scores = scores or []

    def collect(self) -> Samples:
        """Wait until the step is computed and return what it sampled."""
        output = self.samples
        if self._arriving is not None:
            output.token_ids = self._arriving.tolist()
        if self._reports is not None:
            places, report = self._reports
            output.logprobs = dict(zip(places, report.logprobs(), strict=True))
        if self._continued is not None:
            output.continuations = self._continued.collect()
        output.prompt_logprobs = [
            (group, [score for report in reports for score in report.logprobs()])
            for group, reports in self._scores
        ]
        return output

    def fill_placeholders(self, batch: Batch, token_ids: torch.Tensor) -> None:
        """Put the tokens that this step samples into the next step's inputs.

        The device does this, so the host does not wait for the tokens.

        Args:
            batch: The next step's batch.
            token_ids: `[1, num_tokens]`, the next step's tokens; placeholders are replaced in
                place.
        """
        sequences = batch.sequences
        waiting = [i for i, sequence in enumerate(sequences) if sequence.num_placeholders]
        if not waiting:
            return
        starts, ends = batch.starts, batch.ends
        lasts = (ends - starts).cumsum() - 1  # each sequence's last token in the flat batch
        row_of = {sequence.id: i for i, sequence in enumerate(self.samples.sequences)}
        read = [i for i in waiting if ends[i] > sequences[i].num_known]
        if read:
            assert self.token_ids is not None
            rows = np.array([row_of[sequences[i].id] for i in read], np.int64)
            device = token_ids.device
            sampled = self.token_ids.index_select(0, to_device(rows, device))
            token_ids[0].index_copy_(0, to_device(lasts[read], device), sampled)
