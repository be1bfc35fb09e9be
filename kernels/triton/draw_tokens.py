"""Draws tokens from rows of logits without sorting them: one program a row.

What a token lacks of the most likely one, over the temperature, is its distance, from
0 to infinity; its weight is e to the minus that. The bits of such a number, read as an
integer, rise with it. So where top-k and top-p cut is found by narrowing a range of
integers: each pass over the row counts, or weighs, what lies within three bounds. The
draw then inverts the running sum of the weights that are left. All sums are over one
row, in an order that its length alone decides, so no draw depends on the batch.
"""

# Triton reads its kernels' source: types there are its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.host import to_device
from octavo.kernels.sampling_tensors import MIN_TEMPERATURE, SamplingTensors

_TILE = 4096  # tokens that a program looks at together
_WARPS = 32  # rows are few: one program is to keep a multiprocessor busy
_INFINITY = 0x7F800000  # its bits


@triton.jit
def _look(  # noqa: PLR0917
    row, first, vocab_size, greatest, inv_temperature, TILE: tl.constexpr
):
    """A tile's tokens, and their distances as numbers and as integers.

    Past the row's end, and where a logit is no number, a token is infinitely far.
    """
    token = first + tl.arange(0, TILE)
    logit = tl.load(row + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
    distance = (greatest - logit) * inv_temperature
    distance = tl.abs(tl.where(distance >= 0, distance, float("inf")))  # -0 is 0
    return token, distance, distance.to(tl.int32, bitcast=True)


@triton.jit
def _narrow(  # noqa: PLR0917
    row,
    vocab_size,
    greatest,
    inv_temperature,
    target,
    furthest,
    BY_WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the least distance within which tokens' number, or weight, is `target`.

    Returns:
        the bits of the distance, `furthest` if it is not less; the number, or weight, of
        the tokens that are nearer than that.
    """
    nearer = tl.full((), -1, tl.int32)  # within it is too little, or nothing
    within_nearer = tl.full((), 0.0, tl.float32)
    while furthest - nearer > 1:
        quarter = (furthest - nearer + 3) // 4
        low = nearer + quarter
        mid = tl.minimum(low + quarter, furthest - 1)
        high = tl.minimum(mid + quarter, furthest - 1)
        to_low = tl.zeros((TILE,), tl.float32)
        to_mid = tl.zeros((TILE,), tl.float32)
        to_high = tl.zeros((TILE,), tl.float32)
        for first in range(0, vocab_size, TILE):
            token, distance, bits = _look(row, first, vocab_size, greatest, inv_temperature, TILE)
            measure = tl.exp(-distance) if BY_WEIGHT else (token < vocab_size).to(tl.float32)
            to_low += tl.where(bits <= low, measure, 0.0)
            to_mid += tl.where(bits <= mid, measure, 0.0)
            to_high += tl.where(bits <= high, measure, 0.0)
        within_low = tl.sum(to_low, axis=0)
        within_mid = tl.sum(to_mid, axis=0)
        within_high = tl.sum(to_high, axis=0)
        if within_low >= target:
            furthest = low
        elif within_mid >= target:
            nearer, within_nearer, furthest = low, within_low, mid
        elif within_high >= target:
            nearer, within_nearer, furthest = mid, within_mid, high
        else:
            nearer, within_nearer = high, within_high
    return furthest, within_nearer


@triton.jit
def _weigh_nearer(  # noqa: PLR0917
    row, vocab_size, greatest, inv_temperature, cut, TILE: tl.constexpr
):
    """The weight of all tokens that are nearer than `cut`."""
    sums = tl.zeros((TILE,), tl.float32)
    for first in range(0, vocab_size, TILE):
        _, distance, bits = _look(row, first, vocab_size, greatest, inv_temperature, TILE)
        sums += tl.where(bits < cut, tl.exp(-distance), 0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def _cut(  # noqa: PLR0917
    row,
    vocab_size,
    greatest,
    inv_temperature,
    top_k,
    top_p,
    TILE: tl.constexpr,
    INFINITY: tl.constexpr,
):
    """Find what top-k and top-p keep.

    Returns:
        a cut: all that are nearer are kept; of those that are exactly as far, how many.
    """
    cut = tl.full((), INFINITY, tl.int32)
    spare = tl.full((), 0.0, tl.float32) + vocab_size
    if (top_k > 0) & (top_k < vocab_size):
        cut, nearer = _narrow(row, vocab_size, greatest, inv_temperature, top_k, cut, False, TILE)
        spare = top_k - nearer
    if top_p < 1:
        total = _weigh_nearer(row, vocab_size, greatest, inv_temperature, cut, TILE)
        total += spare * tl.exp(-cut.to(tl.float32, bitcast=True))
        target = top_p * total
        within, nearer = _narrow(
            row, vocab_size, greatest, inv_temperature, target, cut, True, TILE
        )
        # As many as it takes to reach the target, one at least. (1e-38 would be no normal
        # float32, and Triton 3.6 takes such a constant for a float64.)
        weight = tl.exp(-within.to(tl.float32, bitcast=True))
        room = tl.maximum(tl.ceil((target - nearer) / tl.maximum(weight, 1e-37)), 1.0)
        spare = tl.where(within < cut, room, tl.minimum(room, spare))
        cut = within
    return cut, spare


@triton.jit
def _end_of_ties(  # noqa: PLR0917
    row, vocab_size, greatest, inv_temperature, cut, spare, TILE: tl.constexpr
):
    """One past the last of the first `spare` tokens that are exactly as far as `cut`."""
    first = tl.full((), 0, tl.int32)
    before = tl.full((), 0.0, tl.float32)
    token, _, bits = _look(row, first, vocab_size, greatest, inv_temperature, TILE)
    here = tl.sum((bits == cut).to(tl.float32), axis=0)
    while (before + here < spare) & (first + TILE < vocab_size):
        before += here
        first += TILE
        token, _, bits = _look(row, first, vocab_size, greatest, inv_temperature, TILE)
        here = tl.sum((bits == cut).to(tl.float32), axis=0)
    tied = bits == cut
    enough = before + tl.cumsum(tied.to(tl.float32), axis=0) >= spare
    return tl.min(tl.where(tied & enough, token + 1, vocab_size), axis=0)


@triton.jit
def _left(  # noqa: PLR0917
    row, first, vocab_size, greatest, inv_temperature, cut, end_of_ties, least, TILE: tl.constexpr
):
    """A tile's tokens and their weights, 0 where they are cut off."""
    token, distance, bits = _look(row, first, vocab_size, greatest, inv_temperature, TILE)
    weight = tl.exp(-distance)
    kept = (bits < cut) | ((bits == cut) & (token < end_of_ties))
    return token, tl.where(kept & (weight >= least), weight, 0.0)


@triton.jit
def _invert(  # noqa: PLR0917
    row,
    vocab_size,
    greatest,
    inv_temperature,
    cut,
    end_of_ties,
    min_p,
    uniform,
    TILE: tl.constexpr,
):
    """The token at which the running sum of the weights left passes `uniform` of it all."""
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, vocab_size, TILE):
        _, weight = _left(
            row, first, vocab_size, greatest, inv_temperature, cut, end_of_ties, min_p, TILE
        )
        total += tl.sum(weight, axis=0).to(tl.float64)
    # Less than all of it: the same sums, added in the same order, will pass it.
    target = tl.minimum(uniform, 1 - 2.0**-52) * total
    first = tl.full((), 0, tl.int32)
    before = tl.full((), 0.0, tl.float64)
    token, weight = _left(
        row, first, vocab_size, greatest, inv_temperature, cut, end_of_ties, min_p, TILE
    )
    here = tl.sum(weight, axis=0).to(tl.float64)
    while (before + here <= target) & (first + TILE < vocab_size):
        before += here
        first += TILE
        token, weight = _left(
            row, first, vocab_size, greatest, inv_temperature, cut, end_of_ties, min_p, TILE
        )
        here = tl.sum(weight, axis=0).to(tl.float64)
    passed = before + tl.cumsum(weight, axis=0).to(tl.float64) > target
    drawn = tl.min(tl.where(passed & (weight > 0), token, vocab_size), axis=0)
    # A running sum and a sum may round apart: then it is the last that has weight.
    last = tl.max(tl.where(weight > 0, token, 0), axis=0)
    return tl.minimum(drawn, last)


@triton.jit
def _draw_tokens_kernel(  # noqa: PLR0917
    logits,
    draws,  # of each row: 1 / temperature, top-k, top-p, min-p, uniform
    out,
    vocab_size,
    TILE: tl.constexpr,
    INFINITY: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * vocab_size
    draw = draws + index * 5
    inv_temperature = tl.load(draw).to(tl.float32)
    top_k = tl.load(draw + 1).to(tl.float32)
    top_p = tl.load(draw + 2).to(tl.float32)
    min_p = tl.load(draw + 3).to(tl.float32)
    uniform = tl.load(draw + 4)

    greatest = tl.full((TILE,), -float("inf"), tl.float32)
    for first in range(0, vocab_size, TILE):
        token = first + tl.arange(0, TILE)
        logit = tl.load(row + token, mask=token < vocab_size, other=-float("inf"))
        greatest = tl.maximum(greatest, logit.to(tl.float32))
    greatest = tl.max(greatest, axis=0)

    cut, spare = _cut(row, vocab_size, greatest, inv_temperature, top_k, top_p, TILE, INFINITY)
    end_of_ties = tl.full((), 0, tl.int32) + vocab_size
    if cut < INFINITY:
        end_of_ties = _end_of_ties(row, vocab_size, greatest, inv_temperature, cut, spare, TILE)
    drawn = _invert(
        row, vocab_size, greatest, inv_temperature, cut, end_of_ties, min_p, uniform, TILE
    )
    tl.store(out + index, drawn.to(tl.int64))


def argmax(rows: Tensor) -> Tensor:
    """Find the first of each row's greatest elements; see `octavo.kernels.ops.argmax`."""
    return rows.max(dim=-1).indices  # torch.argmax takes twice as long


def draw_tokens(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Sample a token from each row; see `octavo.kernels.ops.draw_tokens`."""
    greedy = sampling.temperatures == 0
    if greedy.all():
        return argmax(logits)
    columns = (
        1 / np.where(greedy, 1, sampling.temperatures.clip(min=MIN_TEMPERATURE)),
        np.where(greedy, 1, sampling.top_k),
        np.where(greedy, 1, sampling.top_p),
        sampling.min_p,
        sampling.uniforms,
    )
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _draw_tokens_kernel[(len(logits),)](
        logits.contiguous(),
        to_device(np.stack(columns, 1).astype(np.float64), logits.device),
        out=out,
        vocab_size=logits.shape[1],
        TILE=_TILE,
        INFINITY=_INFINITY,
        num_warps=_WARPS,
    )
    return out
