"""Samples the next tokens of all sequences of a batch at once.

The order is the contract's: logit bias, penalties, stop tokens masked before
`min_tokens`, the constraint's mask, temperature, top-k, top-p, min-p, each applied to the previous
result. Log-probabilities are those of the model's own distribution.
"""

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from octavo.common.sampling_parameters import SamplingParams
from octavo.engine.sampling.random_numbers import uniforms
from octavo.engine.sampling.reports import Continued, Report
from octavo.engine.scheduling.batch import Samples
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup
from octavo.kernels.host import to_device
from octavo.kernels.logits import argmax, draw_tokens, mask_logits
from octavo.kernels.sampling_tensors import SamplingTensors


class SamplingRow(NamedTuple):
    """A sequence to sample a token for.

    Attributes:
        group: The sequence's group.
        sequence: The sequence.
        row: Row of the step's logits to sample from.
        draft: Drafted tokens between the sequence's own tokens and this one.
    """

    group: SequenceGroup
    sequence: Sequence
    row: int
    draft: Rows[int] = ()

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.group.request.sampling

    @property
    def token_ids(self) -> list[int]:
        """The tokens before the sampled one."""
        token_ids = self.sequence.token_ids
        return [*token_ids, *self.draft] if self.draft else token_ids

    @property
    def mask(self) -> np.ndarray | None:
        """The mask of the tokens that its constraint allows; None without a constraint."""
        matcher = self.sequence.matcher
        if matcher is None:
            return None
        return matcher.draft_masks[len(self.draft) - 1] if self.draft else matcher.mask

    @property
    def num_output(self) -> int:
        """Tokens of the output before the sampled one."""
        return self.sequence.num_output + len(self.draft)


def sample(
    logits: torch.Tensor,
    samples: Samples,
    rows: Rows[int],
    inputs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[list[int], Report] | None]:
    """Sample tokens. On a GPU this does not wait for the device.

    Args:
        logits: `[num_rows, vocab_size]` from the model; may be changed.
        samples: The samples to take, at least one token.
        rows: Row of logits of each sample.
        inputs: `[num_rows]` int64, the token that each row of logits follows; needed if
            `penalizes_placeholders(samples)`.

    Returns:
        The tokens, `[len(samples)]` int64. The requested log-probabilities, with their tokens'
        indices; None without requests.
    """
    logits = _select_logits(logits, list(rows))
    if samples.take_greatest:
        constrained = samples.constrained
        _constrain(logits, dict(zip(constrained, rows_of(samples, rows, constrained), strict=True)))
        return argmax(logits), None
    chosen = rows_of(samples, rows)
    logits = logits.float().contiguous()
    reporting = [i for i, row in enumerate(chosen) if row.params.logprobs is not None]
    some = len(reporting) < len(chosen)
    model_logits = logits
    if reporting and (some or any(map(_changes_logits, chosen))):
        model_logits = _copy_rows(logits, reporting)  # a copy, before they are changed
    _add_bias(logits, chosen)
    _penalize(logits, chosen, inputs)
    _mask_stop_tokens(logits, chosen)
    _constrain(logits, dict(enumerate(chosen)))
    tokens = draw_tokens(logits, _sampling_tensors(chosen))
    if not reporting:
        return tokens, None
    reported = _copy_rows(tokens, reporting) if some else tokens
    report = Report(model_logits, reported, [chosen[i].params.logprobs or 0 for i in reporting])
    return tokens, (reporting, report)


def rows_of(
    samples: Samples, rows: Rows[int], chosen: Iterable[int] | None = None
) -> list[SamplingRow]:
    """Return some tokens to sample, or all, one by one."""
    groups, sequences, drafts = samples.groups, samples.sequences, samples.drafts
    if chosen is None and not drafts:
        return list(map(SamplingRow, groups, sequences, rows))
    indices = range(len(samples)) if chosen is None else chosen
    return [SamplingRow(groups[i], sequences[i], rows[i], drafts.get(i, ())) for i in indices]


def _select_logits(logits: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    """Return some rows of logits; the tensor itself if these are all rows in order."""
    return logits if chosen == list(range(len(logits))) else _copy_rows(logits, chosen)


def _copy_rows(tensor: torch.Tensor, chosen: Rows[int]) -> torch.Tensor:
    return tensor.index_select(0, to_device(np.array(chosen, np.int64), tensor.device))


def continue_beams(logits: torch.Tensor, beams: Rows[SamplingRow]) -> Continued:
    """Find each beam's most likely next tokens, as many as its search looks at.

    On a GPU this does not wait for the device.

    Args:
        logits: `[num_rows, vocab_size]`, the model's unchanged logits.
        beams: Running beams, at least one.
    """
    logprobs = torch.log_softmax(
        _select_logits(logits, [beam.row for beam in beams]).float(), dim=-1
    )
    _mask_stop_tokens(logprobs, beams)
    _constrain(logprobs, dict(enumerate(beams)))
    counts = [
        beam.group.beam.candidates_for(len(beam.group.request.stopping))
        for beam in beams
        if beam.group.beam
    ]
    top = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    ids = [beam.sequence.id for beam in beams]
    return Continued(ids, counts, top.indices, top.values)


def penalizes_placeholders(samples: Samples) -> bool:
    """Return whether a penalty counts a token whose id has not reached the host yet."""
    return not samples.take_greatest and any(
        sequence.num_placeholders and group.request.sampling.penalised
        for group, sequence in zip(samples.groups, samples.sequences, strict=True)
    )


def masks_of(rows: Rows[SamplingRow]) -> dict[int, np.ndarray]:
    """Return the masks of constrained rows, by row of logits.

    New outputs share a row. They have no tokens yet, so their masks are equal.
    """
    return {row.row: mask for row in rows if (mask := row.mask) is not None}


def _changes_logits(row: SamplingRow) -> bool:
    return _moves_logits(row) or row.sequence.matcher is not None


def _moves_logits(row: SamplingRow) -> bool:
    """Return whether anything but a constraint changes a row's logits."""
    return row.params.moves_logits or _masks_stop_tokens(row)


def _masks_stop_tokens(row: SamplingRow) -> bool:
    """Return whether an output is too short to stop; a constraint's mask includes this already."""
    least = row.group.request.min_tokens
    return least > 0 and row.num_output < least and row.sequence.matcher is None


# Changes to the logits, in place.


def _add_bias(logits: torch.Tensor, rows: Rows[SamplingRow]) -> None:
    places, values = list[int](), list[float]()
    for i, row in enumerate(rows):
        biases = row.params.logit_bias
        places += [i * logits.shape[1] + token for token in biases]
        values += biases.values()
    if places:
        added = to_device(np.array(values, np.float32), logits.device)
        logits.view(-1).index_add_(0, to_device(np.array(places), logits.device), added)


def _penalize(logits: torch.Tensor, rows: Rows[SamplingRow], inputs: torch.Tensor | None) -> None:
    """Apply the penalties of the CTRL paper (repetition) and the OpenAI API (the others)."""
    penalized = [i for i, row in enumerate(rows) if row.params.penalised]
    if not penalized:
        return
    flat, chosen = logits.view(-1), [rows[i] for i in penalized]
    starts = [i * logits.shape[1] for i in penalized]
    pending = [i for i, row in enumerate(chosen) if row.sequence.num_placeholders]
    lasts: torch.Tensor | None = None
    if pending:
        assert inputs is not None
        lasts = _copy_rows(inputs, [chosen[i].row for i in pending])
    anywhere = _Occurrences(flat, starts, [row.token_ids for row in chosen], pending, lasts)
    repetition = anywhere.each([row.params.repetition_penalty for row in chosen])
    before = flat[anywhere.places]
    # A token that occurs twice is written twice, with the same value. Logits are clamped, as the
    # smallest penalties would make them infinite, which softmax cannot take.
    factor = torch.where(before > 0, 1 / repetition, repetition)
    flat[anywhere.places] = (before * factor).clamp_(max=torch.finfo(flat.dtype).max)
    in_output = [row.token_ids[row.sequence.num_prompt :] for row in chosen]
    outputs = _Occurrences(flat, starts, in_output, pending, lasts)
    flat[outputs.places] -= outputs.each([row.params.presence_penalty for row in chosen])
    frequency = outputs.each([row.params.frequency_penalty for row in chosen])
    flat.scatter_add_(0, outputs.places, -frequency)  # once per token


class _Occurrences:
    """Every occurrence of a token in some rows' sequences.

    Args:
        flat: Logits of all rows, end to end.
        starts: Index of each row's first logit.
        token_lists: The tokens in each row's sequence.
        pending: The rows whose last token is a placeholder.
        lasts: `[len(pending)]` int64, tokens that replace placeholders; None if there are none.

    Attributes:
        places: `[n]` int64, the index of each occurrence's logit.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        starts: Rows[int],
        token_lists: Rows[list[int]],
        pending: Rows[int],
        lasts: torch.Tensor | None,
    ) -> None:
        self._like = flat
        self._lengths = [len(tokens) for tokens in token_lists]
        tokens = np.fromiter(chain.from_iterable(token_lists), np.int64, sum(self._lengths))
        self.places = to_device(tokens + np.repeat(starts, self._lengths), flat.device)
        if lasts is not None:
            ends = np.cumsum(self._lengths)[list(pending)] - 1
            begins = np.array([starts[i] for i in pending])
            indices = lasts + to_device(begins, flat.device)
            self.places.index_copy_(0, to_device(ends, flat.device), indices)

    def each(self, values: Rows[float]) -> torch.Tensor:
        """Return each row's value once per occurrence."""
        repeated = np.repeat(np.array(values, np.float32), self._lengths)
        return to_device(repeated, self._like.device)


def _mask_stop_tokens(logits: torch.Tensor, rows: Rows[SamplingRow]) -> None:
    """Make stop tokens impossible before `min_tokens`."""
    places = [
        i * logits.shape[1] + token
        for i, row in enumerate(rows)
        if _masks_stop_tokens(row)
        for token in row.group.request.stopping
    ]
    if places:
        logits.view(-1).index_fill_(0, to_device(np.array(places), logits.device), -math.inf)


def _constrain(logits: torch.Tensor, rows: Mapping[int, SamplingRow]) -> None:
    """Mask the tokens that outputs' constraints do not allow.

    Args:
        logits: `[n, vocab_size]`.
        rows: The samples by row of logits.
    """
    masks = {i: mask for i, row in rows.items() if (mask := row.mask) is not None}
    if masks:
        mask_logits(logits, list(masks), np.stack(list(masks.values())))


def _sampling_tensors(rows: Rows[SamplingRow]) -> SamplingTensors:
    """Return each row's sampling parameters, with its random number."""
    params = [row.params for row in rows]
    keys = (
        [p.seed for p in params],
        [row.sequence.index for row in rows],
        [row.num_output for row in rows],
    )
    return SamplingTensors(
        temperatures=np.array([p.temperature for p in params]),
        top_k=np.array([p.top_k for p in params], np.int64),
        top_p=np.array([p.top_p for p in params]),
        min_p=np.array([p.min_p for p in params]),
        uniforms=uniforms(*(np.array(key, np.uint64) for key in keys)),
    )
