"""The definition of the kernels for stateful layers.

It is simple and slow: float32 arithmetic, one sequence and one token at a time, any shape and any
device. `octavo.kernels.states` describes the arguments.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor

from octavo.kernels.state_rows import StateRows

EPSILON = 1e-6
"""Term added to the square of a query's or key's length."""


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: StateRows,
    *,
    activation: str | None = None,
) -> Tensor:
    """Convolve each channel over its latest inputs; see `octavo.kernels.states`."""
    channels, width = weight.shape
    per_row = rows.state.shape[2]
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for tokens, place, is_new in _sequences(rows, -(-channels // per_row)):
        state = _read(rows, place, is_new=is_new).flatten(0, 1)[:channels]
        inputs = torch.cat([state, x[tokens].T], 1)
        for i, token in enumerate(range(tokens.start, tokens.stop)):
            summed = (inputs[:, i : i + width].float() * weight.float()).sum(1)
            summed = summed if bias is None else summed + bias.float()
            out[token] = F.silu(summed) if activation == "silu" else summed
        _write_channels(rows, place, inputs[:, 1 - width :])
    return out


def ssd(  # noqa: PLR0917
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    rows: StateRows,
    *,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Compute Mamba-2's state space model; see `octavo.kernels.states`."""
    heads = x.shape[1]
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    steps = _steps(dt, dt_bias, softplus=dt_softplus).clamp(*dt_limits)
    decays = (steps * a.float()).exp()
    b, c = (z.float().repeat_interleave(heads // z.shape[1], 1) for z in (b, c))
    for tokens, place, is_new in _sequences(rows, heads):
        state = _read(rows, place, is_new=is_new)
        for t in range(tokens.start, tokens.stop):
            added = (steps[t, :, None] * x[t].float())[:, :, None] * b[t, :, None]
            state = decays[t, :, None, None] * state + added
            result = (state * c[t, :, None]).sum(-1)
            out[t] = result if d is None else result + d.float()[:, None] * x[t].float()
        rows.state[place] = state
    return out


def gated_delta(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    rows: StateRows,
    *,
    scale: float,
    normalize: bool = False,
) -> Tensor:
    """Compute the gated delta rule; see `octavo.kernels.states`."""
    heads = value.shape[1]
    out = torch.zeros_like(value, memory_format=torch.contiguous_format)
    q, k = (z.float().repeat_interleave(heads // z.shape[1], 1) for z in (query, key))
    if normalize:
        q, k = (z / ((z * z).sum(-1, keepdim=True) + EPSILON).sqrt() for z in (q, k))
    decays = g.float().exp()
    decays = decays if g.dim() == 3 else decays[:, :, None]
    for tokens, place, is_new in _sequences(rows, heads):
        state = _read(rows, place, is_new=is_new)
        for t in range(tokens.start, tokens.stop):
            state = decays[t, :, :, None] * state
            known = (k[t, :, :, None] * state).sum(1)
            change = beta[t, :, None].float() * (value[t].float() - known)
            state = state + k[t, :, :, None] * change[:, None]
            out[t] = (scale * q[t, :, :, None] * state).sum(1)
        rows.state[place] = state
    return out


def selective_scan(  # noqa: PLR0917
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    rows: StateRows,
    *,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """Compute Mamba's selective state space model; see `octavo.kernels.states`."""
    channels = x.shape[1]
    per_row = rows.state.shape[2]
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    steps = _steps(dt, dt_bias, softplus=dt_softplus)
    for tokens, place, is_new in _sequences(rows, -(-channels // per_row)):
        state = _read(rows, place, is_new=is_new).flatten(0, 1)[:channels]
        for t in range(tokens.start, tokens.stop):
            added = (steps[t] * x[t].float())[:, None] * b[t].float()
            state = (steps[t, :, None] * a.float()).exp() * state + added
            result = (state * c[t].float()).sum(-1)
            out[t] = result if d is None else result + d.float() * x[t].float()
        _write_channels(rows, place, state)
    return out


def _steps(dt: Tensor, bias: Tensor | None, *, softplus: bool) -> Tensor:
    """Return the step sizes of a state space model, float32."""
    steps = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(steps) if softplus else steps


def _sequences(rows: StateRows, count: int) -> Iterator[tuple[slice, tuple[Tensor, Tensor], bool]]:
    """Yield each sequence's tokens, the blocks and offsets of its rows, and whether it is new."""
    row = rows.first_row + torch.arange(count, device=rows.state.device)
    block, offset = row // rows.state.shape[1], row % rows.state.shape[1]
    starts = rows.query_starts.tolist()
    for seq, seq_len in enumerate(rows.seq_lens.tolist()):
        first, last = starts[seq], starts[seq + 1]
        if first < last and seq_len:
            place = rows.tables[seq][block].long(), offset
            yield slice(first, last), place, seq_len == last - first


def _read(rows: StateRows, place: tuple[Tensor, Tensor], *, is_new: bool) -> Tensor:
    """Return a sequence's state, `[rows, *row_shape]`."""
    shape = (len(place[0]), *rows.state.shape[2:])
    return rows.state.new_zeros(shape) if is_new else rows.state[place]


def _write_channels(rows: StateRows, place: tuple[Tensor, Tensor], state: Tensor) -> None:
    """Write `[channels, ...]` to rows of several channels; the last row may stay partly unused."""
    whole = rows.state[place]
    whole.flatten(0, 1)[: len(state)] = state
    rows.state[place] = whole
