"""Samples tokens on the CPU in plain PyTorch, for machines without a C++ compiler.

Top-k, top-p and min-p usually keep far fewer tokens than the vocabulary has. So this first looks at
some of the most likely tokens, and looks at more only for rows that need them.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import threshold

from octavo.kernels.sampling_tensors import MIN_TEMPERATURE, SamplingTensors

CANDIDATES = 256
"""Number of most likely tokens that truncation looks at first."""
WIDENING = 8
"""Factor by which that number grows in each further attempt."""


def draw_tokens(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Sample a token from each row; see `octavo.kernels.ops.draw_tokens`."""
    logits = logits.float()
    greedy = sampling.temperatures == 0
    truncated = ~greedy & ((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0))
    tokens = torch.empty(len(logits), dtype=torch.int64)
    for wanted, draw in (
        (greedy, lambda part, _: part.max(dim=-1).indices),
        (~greedy & ~truncated, _draw),
        (truncated, _draw_truncated),
    ):
        (rows,) = np.nonzero(wanted)
        if len(rows):
            part = logits if len(rows) == len(logits) else logits[rows]
            tokens[rows] = draw(part, sampling.select(rows))
    return tokens


def _draw(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Sample from the whole distribution."""
    return _invert(_weigh(_temper(logits, sampling)), _uniforms(sampling))


def _temper(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return logits over the temperature, shifted to a maximum of 0 to avoid overflow."""
    below = logits - logits.amax(dim=-1, keepdim=True)
    return below / _column(logits, sampling.temperatures.clip(min=MIN_TEMPERATURE))


def _weigh(tempered: Tensor) -> Tensor:
    """Return tokens' weights, at most 1; subnormal numbers are 0, as in the C++ kernels."""
    return threshold(torch.exp(tempered), torch.finfo(tempered.dtype).tiny, 0)


def _draw_truncated(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Sample from the tokens that top-k, top-p and min-p keep."""
    scaled = _temper(logits, sampling)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    rows = np.arange(len(logits))
    width = CANDIDATES
    while len(rows):
        width = min(width, logits.shape[1])
        part = sampling.select(rows)
        kept, ids, enough = _truncate(scaled[rows], part, width)
        tokens[rows] = _invert_in_order(kept, ids, part, logits.shape[1])
        rows = rows[~enough.numpy()]
        width *= WIDENING
    return tokens


def _invert_in_order(
    weights: Tensor, ids: Tensor, sampling: SamplingTensors, vocab_size: int
) -> Tensor:
    """Call `_invert` with tokens in the order of their ids, which rounding cannot change."""
    if ids.shape[1] > CANDIDATES:
        spread = weights.new_zeros((len(weights), vocab_size)).scatter_(1, ids, weights)
        return _invert(spread, _uniforms(sampling))
    ids, order = ids.sort(dim=-1)
    place = _invert(weights.gather(1, order), _uniforms(sampling))
    return ids.gather(1, place[:, None])[:, 0]


def _truncate(
    scaled: Tensor, sampling: SamplingTensors, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of each row's `width` most likely tokens, 0 for those cut off.

    Returns:
        `[n, width]` weights, most likely first; `[n, width]` token ids; `[n]`
        whether the cut fell within `width`, so that no token is missing.
    """
    vocab_size = scaled.shape[1]
    top_k = _column(scaled, np.where(sampling.top_k > 0, sampling.top_k, vocab_size))
    top_p = torch.from_numpy(sampling.top_p)[:, None]  # 1 - top-p may be below float32
    min_p = _column(scaled, sampling.min_p)
    values, ids = scaled.topk(width, dim=-1)
    within_k = torch.arange(width) < top_k
    weights = _weigh(values - values[:, :1]) * within_k
    # top-p is a share of the tokens that top-k keeps: all tokens if top-k is off.
    everything = _weigh(scaled - values[:, :1]).sum(dim=-1, keepdim=True, dtype=torch.float64)
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    total = torch.where(top_k <= width, running[:, -1:], everything)
    before = running - weights
    within = within_k & ((before < top_p * total) | (top_p >= 1)) & (weights >= min_p)
    cut = (top_k <= width) | (~within[:, -1:] & (top_k == vocab_size))
    return weights * within, ids, cut[:, 0] | (width == vocab_size)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the column at which each row's running sum exceeds `uniforms` times its total."""
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    total = running[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, 0 * total))
    place = torch.searchsorted(running, target, right=True)[:, 0]
    return place.clamp_(max=weights.shape[1] - 1)


def _uniforms(sampling: SamplingTensors) -> Tensor:
    return torch.from_numpy(sampling.uniforms)


def _column(like: Tensor, values: NDArray[np.generic]) -> Tensor:
    """Return a column with one value per row of `like`."""
    return torch.from_numpy(values).to(like.dtype)[:, None]
