"""Draws the next token of every sequence of a batch at once.

The order is the contract's: logit bias, penalties, stopping tokens held back
before `min_tokens`, temperature, top-k, top-p, min-p, each on what the one
before it left. Log-probabilities are those of the model's own distribution.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch

from engine.batch import Continuations, Draw
from engine.executor.random import uniforms
from engine.request import SamplingParams
from engine.sequence import Sequence, SequenceGroup, TokenLogprob
from kernels import cpu

CANDIDATES = 256
"""Most likely tokens that truncation looks at first; seldom does it need more."""


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
    if all(map(_is_plain, drawers)):
        tokens = _most_likely(logits, drawers).tolist()
        return [Draw(d.group, d.sequence, t) for d, t in zip(drawers, tokens, strict=True)]
    logits = logits.float()
    reporting = [i for i, d in enumerate(drawers) if d.params.logprobs is not None]
    own = torch.log_softmax(logits[reporting], dim=-1) if reporting else None
    _bias(logits, drawers)
    _penalise(logits, drawers)
    _hold_back(logits, drawers)
    tokens = _choose(logits, drawers)
    draws = [Draw(d.group, d.sequence, t) for d, t in zip(drawers, tokens, strict=True)]
    if own is not None:
        counts = [drawers[i].params.logprobs or 0 for i in reporting]
        scores = score(own, [tokens[i] for i in reporting], counts)
        for i, logprob in zip(reporting, scores, strict=True):
            draws[i] = Draw(drawers[i].group, drawers[i].sequence, tokens[i], logprob)
    return draws


def score(logprobs: torch.Tensor, tokens: Rows[int], counts: Rows[int]) -> list[TokenLogprob]:
    """Reports each row's token and its most likely alternatives.

    Args:
        logprobs: `[n, vocab_size]`, normalised.
        tokens: `[n]`, the token to report in each row.
        counts: `[n]`, how many alternatives.
    """
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])
    top = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    alternatives = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    rows = zip(tokens, chosen[:, 0].tolist(), counts, alternatives, strict=True)
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


def _is_plain(drawer: Drawer) -> bool:
    """Whether the logits alone, in whatever precision, say which token it is."""
    params = drawer.params
    return (
        params.greedy
        and not params.penalised
        and not params.logit_bias
        and params.logprobs is None
        and drawer.sequence.num_output >= drawer.group.request.min_tokens
    )


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
    chosen = [drawers[i] for i in rows]
    part = logits[rows]
    in_output = _counts(part, [d.sequence.token_ids[d.sequence.num_prompt :] for d in chosen])
    anywhere = _counts(part, [d.sequence.token_ids for d in chosen]) > 0
    repetition = _column(part, [d.params.repetition_penalty for d in chosen])
    factor = torch.where(part > 0, 1 / repetition, repetition)
    # The smallest penalties would make logits infinite, and those have no softmax.
    part = torch.where(anywhere, part * factor, part).clamp_(max=torch.finfo(part.dtype).max)
    part -= _column(part, [d.params.frequency_penalty for d in chosen]) * in_output
    part -= _column(part, [d.params.presence_penalty for d in chosen]) * (in_output > 0)
    logits[rows] = part


def _counts(like: torch.Tensor, token_lists: Rows[list[int]]) -> torch.Tensor:
    """How often each token is in each list, as `like` is shaped."""
    longest = max(map(len, token_lists))
    padding = like.shape[1]  # one column too many, cut off below
    padded = [tokens + [padding] * (longest - len(tokens)) for tokens in token_lists]
    ids = torch.tensor(padded, dtype=torch.int64, device=like.device)
    counts = like.new_zeros((like.shape[0], padding + 1))
    return counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=like.dtype))[:, :padding]


def _hold_back(logits: torch.Tensor, drawers: Rows[Drawer]) -> None:
    """Stopping tokens are impossible before `min_tokens`."""
    for i, (group, sequence) in enumerate(drawers):
        request = group.request
        if sequence.num_output < request.min_tokens:
            logits[i, list(request.stopping)] = -torch.inf


# Choosing.


def _choose(logits: torch.Tensor, drawers: Rows[Drawer]) -> list[int]:
    tokens = torch.empty(len(drawers), dtype=torch.int64, device=logits.device)
    for wanted, choose in (
        (lambda p: p.greedy, _most_likely),
        (lambda p: not p.greedy and not p.truncated, _draw),
        (lambda p: p.truncated, _draw_truncated),
    ):
        rows = [i for i, drawer in enumerate(drawers) if wanted(drawer.params)]
        if rows:
            part = logits if len(rows) == len(drawers) else logits[rows]
            tokens[rows] = choose(part, [drawers[i] for i in rows])
    chosen: list[int] = tokens.tolist()
    return chosen


def _most_likely(logits: torch.Tensor, _: Rows[Drawer]) -> torch.Tensor:
    """The first of the greatest logits of each row."""
    if logits.device.type == "cpu":
        return cpu.argmax(logits)
    return logits.max(dim=-1).indices


def _draw(logits: torch.Tensor, drawers: Rows[Drawer]) -> torch.Tensor:
    """From the whole distribution."""
    scaled = _temper(logits, drawers)
    return _invert(torch.softmax(scaled, dim=-1), _uniforms(logits, drawers))


def _temper(logits: torch.Tensor, drawers: Rows[Drawer]) -> torch.Tensor:
    """Logits by temperature, the most likely token's at 0: no temperature is too small."""
    below = logits - logits.amax(dim=-1, keepdim=True)
    return below / _column(logits, [d.params.temperature for d in drawers])


def _draw_truncated(logits: torch.Tensor, drawers: Rows[Drawer]) -> torch.Tensor:
    """From what top-k, top-p and min-p leave, without sorting more than that needs."""
    scaled = _temper(logits, drawers)
    uniform = _uniforms(logits, drawers)
    tokens = torch.empty(len(drawers), dtype=torch.int64, device=logits.device)
    rows = list(range(len(drawers)))
    for width in (CANDIDATES, logits.shape[1]):
        part = [drawers[i] for i in rows]
        kept, ids, enough = _truncate(scaled[rows], part, min(width, logits.shape[1]))
        chosen = ids.gather(1, _invert(kept, uniform[rows])[:, None])[:, 0]
        tokens[rows] = chosen
        rows = [row for row, ok in zip(rows, enough.tolist(), strict=True) if not ok]
        if not rows:
            break
    return tokens


def _truncate(
    scaled: torch.Tensor, drawers: Rows[Drawer], width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights of each row's `width` most likely tokens, 0 where they are cut off.

    Returns:
        `[n, width]` weights, most likely first; `[n, width]` token ids; `[n]`
        whether the cut fell within `width`, so that no token is missing.
    """
    top_k = _column(scaled, [d.params.top_k or scaled.shape[1] for d in drawers])
    top_p = _column(scaled, [d.params.top_p for d in drawers])
    min_p = _column(scaled, [d.params.min_p for d in drawers])
    values, ids = scaled.topk(width, dim=-1)
    within_k = torch.arange(width, device=scaled.device) < top_k
    weights = torch.exp(values - values[:, :1]) * within_k
    # top-p is a share of what top-k left: of all the tokens where top-k is off.
    everything = torch.exp(scaled - values[:, :1]).sum(dim=-1, keepdim=True)
    total = torch.where(top_k <= width, weights.sum(dim=-1, keepdim=True), everything)
    before = weights.cumsum(dim=-1) - weights
    within = within_k & ((before < top_p * total) | (top_p >= 1)) & (weights >= min_p)
    cut = (top_k <= width) | (~within[:, -1:] & (top_k == scaled.shape[1]))
    return weights * within, ids, cut[:, 0] | (width == scaled.shape[1])


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The place in each row where the running sum of `weights` passes `uniform` of it all."""
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    total = running[:, -1:]
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, 0 * total))
    place = torch.searchsorted(running, target, right=True)[:, 0]
    return place.clamp_(max=weights.shape[1] - 1)


def _uniforms(like: torch.Tensor, drawers: Rows[Drawer]) -> torch.Tensor:
    draws = uniforms(
        *(
            np.array(column, dtype=np.uint64)
            for column in (
                [d.params.seed for d in drawers],
                [d.sequence.index for d in drawers],
                [d.sequence.num_output for d in drawers],
            )
        )
    )
    return torch.from_numpy(draws).to(like.device)


def _column(like: torch.Tensor, values: Iterable[float]) -> torch.Tensor:
    """One value for each row of `like`."""
    return torch.tensor(list(values), dtype=like.dtype, device=like.device)[:, None]
