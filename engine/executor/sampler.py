"""Draws the next token of every sequence of a batch at once.

The order is the contract's: logit bias, penalties, stopping tokens held back
before `min_tokens`, temperature, top-k, top-p, min-p, each on what the one
before it left. Log-probabilities are those of the model's own distribution.
"""

from collections.abc import Sequence as Rows
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from engine.batch import Continuations, Draw
from engine.executor.random import uniforms
from engine.request import SamplingParams
from engine.sequence import Sequence, SequenceGroup, TokenLogprob
from kernels.draws import Draws
from kernels.ops import argmax, draw_tokens, score_tokens


class Drawer(NamedTuple):
    """A sequence to draw for, and its group."""

    group: SequenceGroup
    sequence: Sequence

    @property
    def params(self) -> SamplingParams:
        """How to draw."""
        return self.group.request.sampling


def sample(logits: torch.Tensor, drawers: Rows[Drawer]) -> list[Draw]:
    """Draws one token for each row.

    Args:
        logits: `[len(drawers), vocab_size]`, as the model gave them; may be
            changed.
        drawers: whose row each is.
    """
    if are_plain(drawers):
        return draw_plainly(argmax(logits).tolist(), drawers)
    logits = logits.float().contiguous()
    reporting = [i for i, d in enumerate(drawers) if d.params.logprobs is not None]
    own = logits
    if reporting and (len(reporting) < len(drawers) or any(map(_changes_logits, drawers))):
        own = logits[reporting]  # a copy, before they are changed
    _bias(logits, drawers)
    _penalise(logits, drawers)
    _hold_back(logits, drawers)
    tokens = draw_tokens(logits, _draws(drawers)).tolist()
    draws = [Draw(d.group, d.sequence, t) for d, t in zip(drawers, tokens, strict=True)]
    if reporting:
        counts = [drawers[i].params.logprobs or 0 for i in reporting]
        scores = score(own, [tokens[i] for i in reporting], counts)
        for i, logprob in zip(reporting, scores, strict=True):
            draws[i] = Draw(drawers[i].group, drawers[i].sequence, tokens[i], logprob)
    return draws


def score(logits: torch.Tensor, tokens: Rows[int], counts: Rows[int]) -> list[TokenLogprob]:
    """Reports each row's token and its most likely alternatives.

    Args:
        logits: `[n, vocab_size]`, as the model gave them.
        tokens: `[n]`, the token to report in each row.
        counts: `[n]`, how many alternatives.
    """
    most = min(max(counts), logits.shape[1])
    scores = score_tokens(logits, torch.tensor(tokens, device=logits.device), most)
    alternatives = zip(scores.top.tolist(), scores.top_logprobs.tolist(), strict=True)
    rows = zip(tokens, scores.logprobs.tolist(), counts, alternatives, strict=True)
    return [
        TokenLogprob(token, logprob, list(zip(ids[:count], values[:count], strict=True)))
        for token, logprob, count, (ids, values) in rows
    ]


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
    rows, columns, values = [], [], []
    for i, drawer in enumerate(drawers):
        for token, bias in drawer.params.logit_bias.items():
            rows.append(i)
            columns.append(token)
            values.append(bias)
    if rows:
        logits[rows, columns] += torch.tensor(values, device=logits.device)


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
        self.places = torch.from_numpy(tokens + np.repeat(starts, self._lengths)).to(flat.device)

    def each(self, values: Rows[float]) -> torch.Tensor:
        """A row's value for each of its occurrences."""
        repeated = np.repeat(np.array(values, np.float32), self._lengths)
        return torch.from_numpy(repeated).to(self._like)


def _hold_back(logits: torch.Tensor, drawers: Rows[Drawer]) -> None:
    """Stopping tokens are impossible before `min_tokens`."""
    for i, (group, sequence) in enumerate(drawers):
        request = group.request
        if sequence.num_output < request.min_tokens:
            logits[i, list(request.stopping)] = -torch.inf


def _draws(drawers: Rows[Drawer]) -> Draws:
    """How to draw for each, with the uniform number that is its own."""
    params = [drawer.params for drawer in drawers]
    keys = (
        [p.seed for p in params],
        [d.sequence.index for d in drawers],
        [d.sequence.num_output for d in drawers],
    )
    return Draws(
        temperatures=np.array([p.temperature for p in params]),
        top_k=np.array([p.top_k for p in params], np.int64),
        top_p=np.array([p.top_p for p in params]),
        min_p=np.array([p.min_p for p in params]),
        uniforms=uniforms(*(np.array(key, np.uint64) for key in keys)),
    )
