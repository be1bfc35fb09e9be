"""Sample the next token of every sequence of a batch at once.

The order is the contract's: logit bias, penalties, stop tokens masked before
`min_tokens`, the constraint's mask, temperature, top-k, top-p, min-p, each applied to what
the one before it left. Log-probabilities are those of the model's own distribution.
"""

import math
from collections.abc import Sequence as Rows
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from octavo.common.sampling_parameters import SamplingParams
from octavo.engine.sampling.random_numbers import uniforms
from octavo.engine.scheduling.batch import Continuations, SampledToken
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup, TokenLogprob
from octavo.engine.scheduling.steady import NO_DECODES, DecodedTokens, Decodes
from octavo.kernels.host import AsyncCopy, to_device
from octavo.kernels.ops import argmax, draw_tokens, mask_logits, score_tokens
from octavo.kernels.sampling_tensors import SamplingTensors


class SamplingRow(NamedTuple):
    """A sequence to sample a token for.

    Attributes:
        group: the sequence's group.
        sequence: the sequence.
        row: the row of the step's logits to sample from.
        draft: drafted tokens behind the sequence's own, which this one is to follow.
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
        """The tokens that the sampled one follows."""
        own = self.sequence.token_ids
        return [*own, *self.draft] if self.draft else own

    @property
    def mask(self) -> np.ndarray | None:
        """What its constraint allows next, as `Matcher.mask`; None without a constraint."""
        matcher = self.sequence.matcher
        if matcher is None:
            return None
        return matcher.draft_masks[len(self.draft) - 1] if self.draft else matcher.mask

    @property
    def num_output(self) -> int:
        """Tokens of the output before the sampled one."""
        return self.sequence.num_output + len(self.draft)


class PendingTokens:
    """Tokens sampled in a step, which may still be on their way to the host.

    Args:
        token_ids: `[len(steady) + len(rows)]` int64, kept alive until they are collected.
        rows: the sequences that the last tokens are for.
        steady: the sequences that the first tokens are for.
        reports: log-probabilities, and the places among all tokens that asked for them.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        rows: Rows[SamplingRow],
        steady: Decodes = NO_DECODES,
        reports: tuple[list[int], "Report"] | None = None,
    ) -> None:
        self.token_ids = token_ids
        self._rows = rows
        self._steady = steady
        self._arriving = AsyncCopy(token_ids)
        self._reports = reports

    @property
    def sequences(self) -> list[Sequence]:
        """The sequence that each token is for."""
        return [*self._steady.sequences, *(row.sequence for row in self._rows)]

    def collect(self) -> tuple[DecodedTokens, list[SampledToken]]:
        """Wait until the tokens have arrived; return those of the steady sequences, and others."""
        token_ids = self._arriving.tolist()
        count = len(self._steady)
        logprobs: dict[int, TokenLogprob] = {}
        if self._reports is not None:
            places, report = self._reports
            logprobs = dict(zip(places, report.logprobs(), strict=True))
        others = zip(self._rows, token_ids[count:], strict=True)
        return DecodedTokens(self._steady, token_ids[:count]), [
            SampledToken(row.group, row.sequence, token_id, logprobs.get(i))
            for i, (row, token_id) in enumerate(others, count)
        ]


NO_TOKENS = PendingTokens(torch.empty(0, dtype=torch.int64), ())


class Report:
    """Log-probabilities of rows' tokens and of the most likely ones, on their way to the host.

    Args:
        logits: `[n, vocab_size]`, as the model gave them.
        tokens: `[n]` int64, the token to report in each row.
        counts: `[n]`, how many of the most likely tokens to report.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, counts: Rows[int]) -> None:
        self._counts = counts
        scores = score_tokens(logits, tokens, min(max(counts), logits.shape[1]))
        self._columns = [AsyncCopy(column) for column in (tokens, *scores)]

    def logprobs(self) -> list[TokenLogprob]:
        """Wait until they have arrived, and return one for each row."""
        columns = (column.tolist() for column in self._columns)
        return [
            TokenLogprob(token, logprob, list(zip(ids[:count], values[:count], strict=True)))
            for count, token, logprob, ids, values in zip(self._counts, *columns, strict=True)
        ]


def sample(
    logits: torch.Tensor,
    rows: Rows[SamplingRow],
    steady: Decodes = NO_DECODES,
    inputs: torch.Tensor | None = None,
) -> PendingTokens:
    """Sample one token for each steady sequence, and one for each other row.

    On a GPU it does not wait for the device.

    Args:
        logits: `[num_rows, vocab_size]`, as the model gave them; may be changed.
        rows: what to sample.
        steady: sequences to sample for from the first rows of logits.
        inputs: `[num_rows]` int64, the token that each row of logits follows; needed if
            `penalizes_placeholders(rows)`.
    """
    count = len(steady)
    if not count and not rows:
        return NO_TOKENS
    logits = _select_logits(logits, [*range(count), *(row.row for row in rows)])
    if steady.takes_greatest and take_greatest(rows):
        _constrain(logits[count:], rows)
        return PendingTokens(argmax(logits), rows, steady)
    others, rows = rows, [*map(SamplingRow, steady.groups, steady.sequences, range(count)), *rows]
    logits = logits.float().contiguous()
    reporting = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    some = len(reporting) < len(rows)
    own = logits
    if reporting and (some or any(map(_changes_logits, rows))):
        own = _copy_rows(logits, reporting)  # a copy, before they are changed
    _add_bias(logits, rows)
    _penalize(logits, rows, inputs)
    _mask_stop_tokens(logits, rows)
    _constrain(logits, rows)
    tokens = draw_tokens(logits, _sampling_tensors(rows))
    if not reporting:
        return PendingTokens(tokens, others, steady)
    reported = _copy_rows(tokens, reporting) if some else tokens
    report = Report(own, reported, [rows[i].params.logprobs or 0 for i in reporting])
    return PendingTokens(tokens, others, steady, (reporting, report))


def _select_logits(logits: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    """Return some rows of logits; the tensor itself if they are all its rows in order."""
    return logits if chosen == list(range(len(logits))) else _copy_rows(logits, chosen)


def _copy_rows(tensor: torch.Tensor, chosen: Rows[int]) -> torch.Tensor:
    return tensor.index_select(0, to_device(np.array(chosen, np.int64), tensor.device))


class PendingContinuations:
    """Beams' most likely next tokens, on their way to the host.

    Args:
        beams: the beams.
        counts: `[len(beams)]`, how many tokens each one's search looks at.
        token_ids: `[len(beams), max(counts)]` int64, most likely first.
        logprobs: the same shape, their log-probabilities.
    """

    def __init__(
        self,
        beams: Rows[SamplingRow],
        counts: Rows[int],
        token_ids: torch.Tensor,
        logprobs: torch.Tensor,
    ) -> None:
        self._ids = [beam.sequence.id for beam in beams]
        self._counts = counts
        self._columns = AsyncCopy(token_ids), AsyncCopy(logprobs)

    def collect(self) -> dict[int, Continuations]:
        """Wait until they have arrived; return tokens and log-probabilities by sequence id."""
        columns = (column.tolist() for column in self._columns)
        return {
            id_: [
                (token_id, value)
                for token_id, value in zip(ids[:count], values[:count], strict=True)
                if value > -math.inf  # a constraint may leave fewer
            ]
            for id_, count, ids, values in zip(self._ids, self._counts, *columns, strict=True)
        }


def continue_beams(logits: torch.Tensor, beams: Rows[SamplingRow]) -> PendingContinuations:
    """Find each beam's most likely next tokens, as many as its search looks at.

    On a GPU it does not wait for the device.

    Args:
        logits: `[num_rows, vocab_size]`, as the model gave them.
        beams: running beams, at least one.
    """
    logprobs = torch.log_softmax(
        _select_logits(logits, [beam.row for beam in beams]).float(), dim=-1
    )
    _mask_stop_tokens(logprobs, beams)
    _constrain(logprobs, beams)
    counts = [
        beam.group.beam.candidates_for(len(beam.group.request.stopping))
        for beam in beams
        if beam.group.beam
    ]
    top = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    return PendingContinuations(beams, counts, top.indices, top.values)


def take_greatest(rows: Rows[SamplingRow]) -> bool:
    """Return whether all take the most likely token of those allowed, and report nothing more."""
    return all(
        row.group.request.takes_greatest
        and (not row.group.request.min_tokens or not _masks_stop_tokens(row))
        for row in rows
    )


def penalizes_placeholders(rows: Rows[SamplingRow]) -> bool:
    """Return whether a penalty counts a token whose id has not reached the host yet."""
    return any(row.sequence.num_placeholders and row.params.penalised for row in rows)


def masks_of(rows: Rows[SamplingRow]) -> dict[int, np.ndarray]:
    """Return the masks of constrained rows, by the row of the logits.

    Outputs that begin share a row. They have no tokens yet, so their masks are the same.
    """
    return {row.row: mask for row in rows if (mask := row.mask) is not None}


def _changes_logits(row: SamplingRow) -> bool:
    return _moves_logits(row) or row.sequence.matcher is not None


def _moves_logits(row: SamplingRow) -> bool:
    """Return whether anything but a constraint changes a row's logits."""
    return row.params.moves_logits or _masks_stop_tokens(row)


def _masks_stop_tokens(row: SamplingRow) -> bool:
    """Return whether an output is too short to stop; a constraint's mask has that already."""
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
    # Where a token occurs twice, the same is written twice. The smallest penalties would
    # make logits infinite, and those have no softmax.
    factor = torch.where(before > 0, 1 / repetition, repetition)
    flat[anywhere.places] = (before * factor).clamp_(max=torch.finfo(flat.dtype).max)
    in_output = [row.token_ids[row.sequence.num_prompt :] for row in chosen]
    outputs = _Occurrences(flat, starts, in_output, pending, lasts)
    flat[outputs.places] -= outputs.each([row.params.presence_penalty for row in chosen])
    frequency = outputs.each([row.params.frequency_penalty for row in chosen])
    flat.scatter_add_(0, outputs.places, -frequency)  # once for each


class _Occurrences:
    """Every occurrence of a token in some rows' sequences.

    Args:
        flat: the logits of all rows, end to end.
        starts: where each row's logits begin.
        token_lists: the tokens in each row's sequence.
        pending: the rows whose last token is a placeholder.
        lasts: `[len(pending)]` int64, the tokens in place of these; None if there are none.

    Attributes:
        places: `[n]` int64, of each occurrence's logit.
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
            found = lasts + to_device(begins, flat.device)
            self.places.index_copy_(0, to_device(ends, flat.device), found)

    def each(self, values: Rows[float]) -> torch.Tensor:
        """Return each row's value once for each of its occurrences."""
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


def _constrain(logits: torch.Tensor, rows: Rows[SamplingRow]) -> None:
    """Make tokens impossible that an output's constraint does not allow next."""
    masks = {i: mask for i, row in enumerate(rows) if (mask := row.mask) is not None}
    if masks:
        mask_logits(logits, list(masks), np.stack(list(masks.values())))


def _sampling_tensors(rows: Rows[SamplingRow]) -> SamplingTensors:
    """Return each row's sampling parameters, with the random number that is its own."""
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
