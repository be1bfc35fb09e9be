"""Samples tokens from rows of logits without sorting them: one program per row.

A token's distance is the greatest logit minus its own, over the temperature, from 0 to infinity;
its weight is exp(-distance). A distance's bits, read as an integer, rise with it. So the kernel
finds the cuts of top-k and top-p by narrowing a range of integers: each pass over the row counts
tokens, or sums their weights, within three bounds. Sampling then inverts the running sum of the
remaining weights. All sums are over one row, in an order that depends only on its length, so no
sample depends on the batch.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu import MAX_THREADS, Gpu, describe_gpu
from octavo.kernels.host_copies import to_device
from octavo.kernels.sampling_tensors import MIN_TEMPERATURE, SamplingTensors

_TILE = 4096  # tokens that a program loads at a time
_INFINITY = 0x7F800000  # the bits of infinity


@triton.jit
def _look(  # noqa: PLR0917
    row, first, vocab_size, greatest, inv_temperature, TILE: tl.constexpr
):
    """Return a tile's tokens, and their distances as floats and as integers.

    The distance is infinite past the row's end and where a logit is NaN.
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
    """Find the least distance within which the tokens' count or weight is at least `target`.

    Returns:
        The bits of the distance, at most `furthest`, and the count or weight of nearer tokens.
    """
    nearer = tl.full((), -1, tl.int32)  # the count or weight within it is below the target
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
    """Return the weight of all tokens nearer than `cut`."""
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
    """Find the tokens that top-k and top-p keep.

    Returns:
        The cut's distance; all nearer tokens are kept. And the number of tokens kept at the cut.
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
        # As many tokens as needed to reach the target, at least one. (1e-38 is not a normal
        # float32, and Triton 3.6 treats such a constant as a float64.)
        weight = tl.exp(-within.to(tl.float32, bitcast=True))
        room = tl.maximum(tl.ceil((target - nearer) / tl.maximum(weight, 1e-37)), 1.0)
        spare = tl.where(within < cut, room, tl.minimum(room, spare))
        cut = within
    return cut, spare


@triton.jit
def _end_of_ties(  # noqa: PLR0917
    row, vocab_size, greatest, inv_temperature, cut, spare, TILE: tl.constexpr
):
    """Return the id after the `spare`th token at the distance `cut`."""
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
def _kept_weights(  # noqa: PLR0917
    row, first, vocab_size, greatest, inv_temperature, cut, end_of_ties, least, TILE: tl.constexpr
):
    """Return a tile's tokens and their weights, 0 for those cut off."""
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
    """Return the token where the running sum of weights exceeds `uniform` of the total."""
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, vocab_size, TILE):
        _, weight = _kept_weights(
            row, first, vocab_size, greatest, inv_temperature, cut, end_of_ties, min_p, TILE
        )
        total += tl.sum(weight, axis=0).to(tl.float64)
    target = uniform * total
    first = tl.full((), 0, tl.int32)
    before = tl.full((), 0.0, tl.float64)
    token, weight = _kept_weights(
        row, first, vocab_size, greatest, inv_temperature, cut, end_of_ties, min_p, TILE
    )
    here = tl.sum(weight, axis=0).to(tl.float64)
    while (before + here <= target) & (first + TILE < vocab_size):
        before += here
        first += TILE
        token, weight = _kept_weights(
            row, first, vocab_size, greatest, inv_temperature, cut, end_of_ties, min_p, TILE
        )
        here = tl.sum(weight, axis=0).to(tl.float64)
    # The tile's running sum differs from its sum by rounding: scale the target to it. Otherwise
    # tokens lighter than the difference would be sampled too often, or never.
    weight = weight.to(tl.float64)
    running = before + tl.cumsum(weight, axis=0)
    reached = tl.max(running, axis=0)
    if before + here == total:  # later tokens have no weight
        target = uniform * reached
    else:
        target = before + (target - before) / here * (reached - before)
    passed = running > tl.minimum(target, (1 - 2.0**-53) * reached)
    # A GPU adds in any order, so running sums may also differ where weights are negligible.
    heavy = (weight > 0) & (running + weight > running)
    last = tl.max(tl.where(heavy, token, -1), axis=0)
    if last < 0:
        heavy = weight > 0
        last = tl.max(tl.where(heavy, token, 0), axis=0)
    drawn = tl.min(tl.where(passed & heavy, token, vocab_size), axis=0)
    return tl.minimum(drawn, last)


@triton.jit
def _draw_tokens_kernel(  # noqa: PLR0917
    logits,
    draws,  # per row: 1 / temperature, top-k, top-p, min-p, uniform
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


def warps_on(gpu: Gpu) -> int:
    """Return the maximum warps of a program: with few rows, each must fill a multiprocessor."""
    return MAX_THREADS // gpu.warp_size


def argmax(rows: Tensor) -> Tensor:
    """Return the column of each row's greatest element; see `octavo.kernels.logits.argmax`."""
    return rows.max(dim=-1).indices  # torch.argmax takes twice as long


def draw_tokens(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Sample a token from each row; see `octavo.kernels.logits.draw_tokens`."""
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
        num_warps=warps_on(describe_gpu(logits.device)),
    )
    return out
