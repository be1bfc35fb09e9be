"""Draws the next token of every sequence of a batch at once.

The order is the contract's: logit bias, penalties, stopping tokens held back
before `min_tokens`, temperature, top-k, top-p, min-p, each on what the one
before it left. Log-probabilities are those of the model's own distribution.
"""

import math
from collections.abc import Sequence as Rows
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from octavo.engine.sampling.random_numbers import uniforms
from octavo.engine.scheduling.batch import Continuations, Draw
from octavo.engine.scheduling.request import SamplingParams
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup, TokenLogprob
from octavo.kernels.host import AsyncCopy, to_device
from octavo.kernels.ops import argmax, draw_tokens, score_tokens
from octavo.kernels.sampling_tensors import SamplingTensors


class Drawer(NamedTuple):
    """A sequence to draw for, and its group."""

    group: SequenceGroup
    sequence: Sequence

    @property
    def params(self) -> SamplingParams:
        """How to draw."""
        return self.group.request.sampling


class Sampled:
    """Tokens drawn for the rows of a step, which may be on their way to the host still.

    Args:
        tokens: `[len(drawers)]` int64.
        drawers: whose each is.
        reports: of those that want log-probabilities, by their places.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        drawers: Rows[Drawer],
        reports: tuple[list[int], "Report"] | None = None,
    ) -> None:
        self.tokens = tokens
        self.drawers = drawers
        self._arriving = AsyncCopy(tokens)
        self._reports = reports

    def draws(self) -> list[Draw]:
        """Waits until they are there."""
        tokens = self._arriving.tolist()
        logprobs: dict[int, TokenLogprob] = {}
        if self._reports is not None:
            places, report = self._reports
            logprobs = dict(zip(places, report.logprobs(), strict=True))
        return [
            Draw(drawer.group, drawer.sequence, token, logprobs.get(i))
            for i, (drawer, token) in enumerate(zip(self.drawers, tokens, strict=True))
        ]


class Report:
    """Rows' tokens and their most likely alternatives, on their way to the host.

    Args:
        logits: `[n, vocab_size]`, as the model gave them.
        tokens: `[n]` int64, the token to report in each row.
        counts: `[n]`, how many alternatives.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, counts: Rows[int]) -> None:
        self._counts = counts
        scores = score_tokens(logits, tokens, min(max(counts), logits.shape[1]))
        self._columns = [AsyncCopy(column) for column in (tokens, *scores)]

    def logprobs(self) -> list[TokenLogprob]:
        """One for each row; waits until they are there."""
        columns = (column.tolist() for column in self._columns)
        return [
            TokenLogprob(token, logprob, list(zip(ids[:count], values[:count], strict=True)))
            for count, token, logprob, ids, values in zip(self._counts, *columns, strict=True)
        ]


def sample(logits: torch.Tensor, drawers: Rows[Drawer]) -> Sampled:
    """Draws one token for each row.

    On a GPU it waits for nothing.

    Args:
        logits: `[len(drawers), vocab_size]`, as the model gave them; may be
            changed.
        drawers: whose row each is.
    """
    if are_plain(drawers):
        return Sampled(argmax(logits), drawers)
    logits = logits.float().contiguous()
    reporting = [i for i, d in enumerate(drawers) if d.params.logprobs is not None]
    some = len(reporting) < len(drawers)
    own = logits
    if reporting and (some or any(map(_changes_logits, drawers))):
        own = choose_rows(logits, reporting)  # a copy, before they are changed
    _bias(logits, drawers)
    _penalise(logits, drawers)
    _hold_back(logits, drawers)
    tokens = draw_tokens(logits, _draws(drawers))
    if not reporting:
        return Sampled(tokens, drawers)
    reported = choose_rows(tokens, reporting) if some else tokens
    report = Report(own, reported, [drawers[i].params.logprobs or 0 for i in reporting])
    return Sampled(tokens, drawers, (reporting, report))


def choose_rows(rows: torch.Tensor, chosen: Rows[int]) -> torch.Tensor:
    """A copy of some rows."""
    return rows.index_select(0, to_device(np.array(chosen, np.int64), rows.device))


def continue_beams(logits: torch.Tensor, beams: Rows[Drawer]) -> dict[int, Continuations]:
    """Finds each running beam's most likely next tokens, as many as its search looks at.

    Args:
        logits: `[len(beams), vocab_size]`, as the model gave them.
        beams: whose row each is; groups must have a search.

    Returns:
        Tokens and log-probabilities, most likely first, by sequence id.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    _hold_back(logprobs, beams)
    counts = [
        group.beam.candidates_for(len(group.request.stopping)) for group, _ in beams if group.beam
    ]
    top = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    rows = zip(beams, counts, top.indices.tolist(), top.values.tolist(), strict=True)
    return {
        beam.sequence.id: list(zip(ids[:count], values[:count], strict=True))
        for beam, count, ids, values in rows
    }


def are_plain(drawers: Rows[Drawer]) -> bool:
    """Whether all draw the most likely token, and want to know no more."""
    return all(map(_is_plain, drawers))


def draw_plainly(most_likely: Rows[int], drawers: Rows[Drawer]) -> list[Draw]:
    """Draws for drawers that are plain.

    Args:
        most_likely: `[len(drawers)]`, tokens.
        drawers: whose each is.
    """
    return [Draw(d.group, d.sequence, t) for d, t in zip(drawers, most_likely, strict=True)]


def _is_plain(drawer: Drawer) -> bool:
    params = drawer.params
    return params.greedy and params.logprobs is None and not _changes_logits(drawer)


def _changes_logits(drawer: Drawer) -> bool:
    params = drawer.params
    early = drawer.sequence.num_output < drawer.group.request.min_tokens
    return params.penalised or bool(params.logit_bias) or early


# Changes to the logits, in place.


def _bias(logits: torch.Tensor, drawers: Rows[Drawer]) -> None:
    places, values = list[int](), list[float]()
    for i, drawer in enumerate(drawers):
        biases = drawer.params.logit_bias
        places += [i * logits.shape[1] + token for token in biases]
        values += biases.values()
    if places:
        added = to_device(np.array(values, np.float32), logits.device)
        logits.view(-1).index_add_(0, to_device(np.array(places), logits.device), added)


def _penalise(logits: torch.Tensor, drawers: Rows[Drawer]) -> None:
    """The penalties of the CTRL paper (repetition) and the OpenAI API (the others)."""
    rows = [i for i, drawer in enumerate(drawers) if drawer.params.penalised]
    if not rows:
        return
    flat, chosen = logits.view(-1), [drawers[i] for i in rows]
    starts = [i * logits.shape[1] for i in rows]
    anywhere = _Occurrences(flat, starts, [d.sequence.token_ids for d in chosen])
    repetition = anywhere.each([d.params.repetition_penalty for d in chosen])
    before = flat[anywhere.places]
    # Where a token occurs twice, the same is written twice. The smallest penalties would
    # make logits infinite, and those have no softmax.
    factor = torch.where(before > 0, 1 / repetition, repetition)
    flat[anywhere.places] = (before * factor).clamp_(max=torch.finfo(flat.dtype).max)
    in_output = [d.sequence.token_ids[d.sequence.num_prompt :] for d in chosen]
    outputs = _Occurrences(flat, starts, in_output)
    flat[outputs.places] -= outputs.each([d.params.presence_penalty for d in chosen])
    frequency = outputs.each([d.params.frequency_penalty for d in chosen])
    flat.scatter_add_(0, outputs.places, -frequency)  # once for each


class _Occurrences:
    """All occurrences of tokens in some rows' sequences.

    Args:
        flat: the logits of all rows, end to end.
        starts: where each row's begin.
        token_lists: the tokens in each row's sequence.

    Attributes:
        places: `[n]` int64, of each occurrence's logit.
    """

    def __init__(self, flat: torch.Tensor, starts: Rows[int], token_lists: Rows[list[int]]) -> None:
        self._like = flat
        self._lengths = [len(tokens) for tokens in token_lists]
        tokens = np.fromiter(chain.from_iterable(token_lists), np.int64, sum(self._lengths))
        self.places = to_device(tokens + np.repeat(starts, self._lengths), flat.device)

    def each(self, values: Rows[float]) -> torch.Tensor:
        """A row's value for each of its occurrences."""
        repeated = np.repeat(np.array(values, np.float32), self._lengths)
        return to_device(repeated, self._like.device)


def _hold_back(logits: torch.Tensor, drawers: Rows[Drawer]) -> None:
    """Stopping tokens are impossible before `min_tokens`."""
    places = [
        i * logits.shape[1] + token
        for i, (group, sequence) in enumerate(drawers)
        if sequence.num_output < group.request.min_tokens
        for token in group.request.stopping
    ]
    if places:
        logits.view(-1).index_fill_(0, to_device(np.array(places), logits.device), -math.inf)


def _draws(drawers: Rows[Drawer]) -> SamplingTensors:
    """How to draw for each, with the uniform number that is its own."""
    params = [drawer.params for drawer in drawers]
    keys = (
        [p.seed for p in params],
        [d.sequence.index for d in drawers],
        [d.sequence.num_output for d in drawers],
    )
    return SamplingTensors(
        temperatures=np.array([p.temperature for p in params]),
        top_k=np.array([p.top_k for p in params], np.int64),
        top_p=np.array([p.top_p for p in params]),
        min_p=np.array([p.min_p for p in params]),
        uniforms=uniforms(*(np.array(key, np.uint64) for key in keys)),
    )
