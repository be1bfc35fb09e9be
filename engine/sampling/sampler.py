"""Samples the next tokens of all sequences of a batch at once.

The order is the contract's: logit bias, penalties, allowed tokens, bad words, stop tokens masked
before `min_tokens`, the constraint's mask, temperature, top-k, top-p, min-p, each applied to the
previous result. Log-probabilities are those of the model's own distribution.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.engine.sampling.random_numbers import uniforms
from octavo.engine.sampling.reports import Continued, Report
from octavo.engine.scheduling.batch import Samples
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.engine.scheduling.sequence import PLACEHOLDER
from octavo.kernels.host_copies import to_device
from octavo.kernels.logits import argmax, draw_tokens, mask_logits
from octavo.kernels.sampling_tensors import SamplingTensors


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
            `reads_placeholders(samples)`.

    Returns:
        The tokens, `[len(samples)]` int64. The requested log-probabilities, with their tokens'
        indices; None without requests.
    """
    logits = _select_logits(logits, list(rows))
    if samples.take_greatest:
        _constrain(logits, samples)
        return argmax(logits), None
    logits = logits.float().contiguous()
    params = [group.request.sampling for group in samples.groups]
    reporting = [i for i, each in enumerate(params) if each.logprobs is not None]
    some = len(reporting) < len(samples)
    model_logits = logits
    if reporting and (some or _changes_logits(samples)):
        model_logits = _copy_rows(logits, reporting)  # a copy, before they are changed
    _add_bias(logits, params)
    _penalize(logits, samples, rows, inputs)
    _allow(logits, params)
    _ban_words(logits, samples, rows, inputs)
    _mask_stop_tokens(logits, samples)
    _constrain(logits, samples)
    tokens = draw_tokens(logits, _sampling_tensors(samples, params))
    if not reporting:
        return tokens, None
    reported = _copy_rows(tokens, reporting) if some else tokens
    report = Report(model_logits, reported, [params[i].logprobs or 0 for i in reporting])
    return tokens, (reporting, report)


def _select_logits(logits: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    """Return some rows of logits; the tensor itself if these are all rows in order."""
    return logits if chosen == list(range(len(logits))) else _copy_rows(logits, chosen)


def _copy_rows(tensor: torch.Tensor, chosen: Rows[int]) -> torch.Tensor:
    return tensor.index_select(0, to_device(np.array(chosen, np.int64), tensor.device))


def continue_beams(logits: torch.Tensor, beams: Samples, rows: Rows[int]) -> Continued:
    """Find each beam's most likely next tokens, as many as its search looks at.

    On a GPU this does not wait for the device.

    Args:
        logits: `[num_rows, vocab_size]`, the model's unchanged logits.
        beams: Running beams, at least one.
        rows: Row of logits of each one.
    """
    logprobs = torch.log_softmax(_select_logits(logits, list(rows)).float(), dim=-1)
    _mask_stop_tokens(logprobs, beams)
    _constrain(logprobs, beams)
    counts = [
        group.beam.candidates_for(len(group.request.stopping))
        for group in beams.groups
        if group.beam
    ]
    top = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    ids = [sequence.id for sequence in beams.sequences]
    return Continued(ids, counts, top.indices, top.values)


def reads_placeholders(samples: Samples) -> bool:
    """Return whether a penalty or bad word needs a token whose id has not reached the host yet."""
    return not samples.take_greatest and any(
        sequence.num_placeholders
        and (group.request.sampling.penalised or bool(group.request.bad_words))
        for group, sequence in zip(samples.groups, samples.sequences, strict=True)
    )


def masks_of(samples: Samples, chosen: Iterable[int]) -> dict[int, np.ndarray]:
    """Return the masks of what constraints allow, by the index of the token."""
    return {i: mask for i in chosen if (mask := _mask(samples, i)) is not None}


def _mask(samples: Samples, i: int) -> np.ndarray | None:
    """Return the mask of a token; None without a constraint."""
    matcher, draft = samples.sequences[i].matcher, samples.drafts.get(i)
    if matcher is None:
        return None
    return matcher.draft_masks[len(draft) - 1] if draft else matcher.mask


def _num_output(samples: Samples, i: int) -> int:
    """Return how many tokens of its output a token follows."""
    return samples.sequences[i].num_output + len(samples.drafts.get(i, ()))


def _changes_logits(samples: Samples) -> bool:
    """Return whether the logits of any token are changed."""
    return (
        any(g.request.sampling.moves_logits or g.request.bad_words for g in samples.groups)
        or bool(samples.constrained)
        or bool(_too_short(samples))
    )


def _too_short(samples: Samples) -> list[int]:
    """Return the tokens of outputs too short to stop; a constraint's mask includes this already."""
    return [
        i
        for i, (group, sequence) in enumerate(zip(samples.groups, samples.sequences, strict=True))
        if group.request.min_tokens > 0
        and _num_output(samples, i) < group.request.min_tokens
        and sequence.matcher is None
    ]


# Changes to the logits, in place.


def _add_bias(logits: torch.Tensor, params: Rows[SamplingParams]) -> None:
    places, values = list[int](), list[float]()
    for i, each in enumerate(params):
        biases = each.logit_bias
        places += [i * logits.shape[1] + token for token in biases]
        values += biases.values()
    if places:
        added = to_device(np.array(values, np.float32), logits.device)
        logits.view(-1).index_add_(0, to_device(np.array(places), logits.device), added)


def _penalize(
    logits: torch.Tensor, samples: Samples, rows: Rows[int], inputs: torch.Tensor | None
) -> None:
    """Apply the penalties of the CTRL paper (repetition) and the OpenAI API (the others)."""
    penalized = [i for i, g in enumerate(samples.groups) if g.request.sampling.penalised]
    if not penalized:
        return
    flat, starts = logits.view(-1), [i * logits.shape[1] for i in penalized]
    params = [samples.groups[i].request.sampling for i in penalized]
    sequences = [samples.sequences[i] for i in penalized]
    # NumPy converts 64 lists of 2,000 tokens in 3 ms, which is longer than the penalties take.
    tokens = [_all_tokens(samples, i) for i in penalized]
    pending = [i for i, sequence in enumerate(sequences) if sequence.num_placeholders]
    lasts: torch.Tensor | None = None
    if pending:
        assert inputs is not None
        lasts = _copy_rows(inputs, [rows[penalized[i]] for i in pending])
    if any(each.repetition_penalty != 1 for each in params):
        anywhere = _Occurrences(flat, starts, tokens, pending, lasts)
        repetition = anywhere.each([each.repetition_penalty for each in params])
        before = flat[anywhere.places]
        # A token that occurs twice is written twice, with the same value. Logits are clamped, as
        # the smallest penalties would make them infinite, which softmax cannot take.
        factor = torch.where(before > 0, 1 / repetition, repetition)
        flat[anywhere.places] = (before * factor).clamp_(max=torch.finfo(flat.dtype).max)
    if any(each.presence_penalty or each.frequency_penalty for each in params):
        in_output = [ids[s.num_prompt :] for ids, s in zip(tokens, sequences, strict=True)]
        outputs = _Occurrences(flat, starts, in_output, pending, lasts)
        flat[outputs.places] -= outputs.each([each.presence_penalty for each in params])
        frequency = outputs.each([each.frequency_penalty for each in params])
        flat.scatter_add_(0, outputs.places, -frequency)  # once per token


def _all_tokens(samples: Samples, i: int) -> NDArray[np.int64]:
    """Return the tokens that a token follows, a placeholder and drafted ones among them."""
    sequence, draft = samples.sequences[i], samples.drafts.get(i, ())
    placeholders = [PLACEHOLDER] * sequence.num_placeholders
    if not placeholders and not draft:
        return sequence.known_tokens()
    return np.concatenate((sequence.known_tokens(), [*placeholders, *draft]), dtype=np.int64)


class _Occurrences:
    """Every occurrence of a token in some rows' sequences.

    Args:
        flat: Logits of all rows, end to end.
        starts: Index of each row's first logit.
        tokens: The tokens in each row's sequence, int64.
        pending: The rows whose last token is a placeholder.
        lasts: `[len(pending)]` int64, tokens that replace placeholders; None if there are none.

    Attributes:
        places: `[n]` int64, the index of each occurrence's logit.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        starts: Rows[int],
        tokens: Rows[NDArray[np.int64]],
        pending: Rows[int],
        lasts: torch.Tensor | None,
    ) -> None:
        self._like = flat
        self._lengths = [len(each) for each in tokens]
        places = np.concatenate(tokens) + np.repeat(starts, self._lengths)
        self.places = to_device(places, flat.device)
        if lasts is not None:
            ends = np.cumsum(self._lengths)[list(pending)] - 1
            begins = np.array([starts[i] for i in pending])
            indices = lasts + to_device(begins, flat.device)
            self.places.index_copy_(0, to_device(ends, flat.device), indices)

    def each(self, values: Rows[float]) -> torch.Tensor:
        """Return each row's value once per occurrence."""
        repeated = np.repeat(np.array(values, np.float32), self._lengths)
        return to_device(repeated, self._like.device)


def _allow(logits: torch.Tensor, params: Rows[SamplingParams]) -> None:
    """Make all tokens impossible but the allowed ones, where these are listed."""
    for i, each in enumerate(params):
        if each.allowed_token_ids:
            allowed = to_device(np.array(each.allowed_token_ids), logits.device)
            kept = logits[i].index_select(0, allowed)
            logits[i].fill_(-math.inf).index_copy_(0, allowed, kept)


def _ban_words(
    logits: torch.Tensor, samples: Samples, rows: Rows[int], inputs: torch.Tensor | None
) -> None:
    """Make tokens impossible that would complete a bad word."""
    places, pending = list[int](), list[tuple[int, int, int]]()
    for i, (group, sequence) in enumerate(zip(samples.groups, samples.sequences, strict=True)):
        if not group.request.bad_words:
            continue
        output = [*sequence.token_ids[sequence.num_prompt :], *samples.drafts.get(i, ())]
        known = len(output) - bool(sequence.num_placeholders)
        for *start, last in group.request.bad_words:
            place, begin = i * logits.shape[1] + last, len(output) - len(start)
            if begin < 0 or output[begin:known] != start[: known - begin]:
                continue
            if not start or known == len(output):
                places.append(place)
            else:  # the placeholder decides
                pending.append((place, rows[i], start[-1]))
    flat = logits.view(-1)
    if places:
        flat.index_fill_(0, to_device(np.array(places), logits.device), -math.inf)
    if pending:
        assert inputs is not None
        ends, at, needed = (
            to_device(np.array(c), logits.device) for c in zip(*pending, strict=True)
        )
        banned = torch.where(inputs[at] == needed, -math.inf, 0.0)
        flat.index_add_(0, ends, banned)


def _mask_stop_tokens(logits: torch.Tensor, samples: Samples) -> None:
    """Make stop tokens impossible before `min_tokens`."""
    places = [
        i * logits.shape[1] + token
        for i in _too_short(samples)
        for token in samples.groups[i].request.stopping
    ]
    if places:
        logits.view(-1).index_fill_(0, to_device(np.array(places), logits.device), -math.inf)


def _constrain(logits: torch.Tensor, samples: Samples) -> None:
    """Mask the tokens that outputs' constraints do not allow.

    Args:
        logits: `[len(samples), vocab_size]`.
        samples: The tokens.
    """
    if masks := masks_of(samples, samples.constrained):
        mask_logits(logits, list(masks), np.stack(list(masks.values())))


def _sampling_tensors(samples: Samples, params: Rows[SamplingParams]) -> SamplingTensors:
    """Return each token's sampling parameters, with its random number."""
    keys = (
        [p.seed for p in params],
        [sequence.index for sequence in samples.sequences],
        [_num_output(samples, i) for i in range(len(samples))],
    )
    return SamplingTensors(
        temperatures=np.array([p.temperature for p in params]),
        top_k=np.array([p.top_k for p in params], np.int64),
        top_p=np.array([p.top_p for p in params]),
        min_p=np.array([p.min_p for p in params]),
        uniforms=uniforms(*(np.array(key, np.uint64) for key in keys)),
    )
