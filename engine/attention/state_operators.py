"""The operations of stateful layers, as PyTorch operators.

As in `octavo::paged_attention`, they take a state's number, not its memory: `attending` sets the
current step around the model. `octavo.kernels.states` documents them. In traced steps, the step
sizes, rates and gates of recurrences must be contiguous float32; see
kernels/cpu/state_calls.h.
"""

# An operator's arguments are positional.
# ruff: noqa: PLR0917

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.engine.attention.operator import DryRun, PagedStep, any_step
from octavo.engine.operators import define
from octavo.kernels import states
from octavo.kernels.state_rows import StateRows

_INPUTS = "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, int state"
_STEPS = "Tensor? d, Tensor? dt_bias, bool softplus"
_DELTA = "Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, int state"
SCHEMAS = (
    "causal_conv(Tensor x, Tensor weight, Tensor? bias, int state, bool silu) -> Tensor",
    f"ssd({_INPUTS}, {_STEPS}, float least_dt, float most_dt) -> Tensor",
    f"gated_delta({_DELTA}, float scale, bool normalize) -> Tensor",
    f"selective_scan({_INPUTS}, {_STEPS}) -> Tensor",
)


def _rows(number: int) -> StateRows | None:
    """Return the current step's rows of a state; None in a dry run."""
    step = any_step()
    if not isinstance(step, PagedStep):
        assert isinstance(step, DryRun)
        return None
    state, first_row, group = step.states[number]
    metadata = step.groups[group]
    return StateRows(
        *(state, first_row, metadata.block_tables, metadata.query_starts, metadata.seq_lens),
        max_query_len=metadata.max_query_len,
    )


def _causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: int, silu: bool) -> Tensor:
    if (rows := _rows(state)) is None:
        return torch.zeros_like(x)
    return states.causal_conv(x, weight, bias, rows, activation="silu" if silu else None)


def _ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: int,
    d: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    least_dt: float,
    most_dt: float,
) -> Tensor:
    if (rows := _rows(state)) is None:
        return torch.zeros_like(x)
    limits = (least_dt, most_dt)
    return states.ssd(
        x, dt, a, b, c, rows, d=d, dt_bias=dt_bias, dt_softplus=softplus, dt_limits=limits
    )


def _gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: int,
    scale: float,
    normalize: bool,
) -> Tensor:
    if (rows := _rows(state)) is None:
        return torch.zeros_like(value)
    return states.gated_delta(query, key, value, g, beta, rows, scale=scale, normalize=normalize)


def _selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: int,
    d: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
) -> Tensor:
    if (rows := _rows(state)) is None:
        return torch.zeros_like(x)
    return states.selective_scan(x, dt, a, b, c, rows, d=d, dt_bias=dt_bias, dt_softplus=softplus)


_FUNCTIONS: tuple[Callable[..., Tensor], ...] = (_causal_conv, _ssd, _gated_delta, _selective_scan)
for _schema, _function, _like in zip(SCHEMAS, _FUNCTIONS, (0, 0, 2, 0), strict=True):
    define(
        _schema,
        lambda *arguments, like=_like: arguments[like].new_empty(arguments[like].shape),
        writes=True,  # the state
        CompositeExplicitAutograd=_function,
    )
