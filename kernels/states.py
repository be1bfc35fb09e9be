"""The operations of stateful layers, which keep a state instead of keys and values.

Each takes a flat batch, `[num_tokens, ...]` without padding, of chunks of any length and decodes,
and updates the sequences' states in the cache; see `StateRows`. Arithmetic is float32 whatever the
dtype of the tensors. `octavo.kernels.reference_states` defines the operations.
"""

import math

import torch
from torch import Tensor

from octavo.kernels.backend import find_backend
from octavo.kernels.state_rows import StateRows

ACTIVATIONS = (None, "silu")
MIN_WIDTH, MAX_WIDTH = 2, 8
"""Limits of the width of a convolution."""


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: StateRows,
    *,
    activation: str | None = None,
) -> Tensor:
    """Convolve each channel with its own weights over its latest inputs.

    A token's output is `sum(weight[:, i] * input[i])` over its sequence's last `width` inputs, the
    last of which is the token's own. The inputs before a sequence's first are zeros.

    Args:
        x: `[num_tokens, channels]`; may be a strided view.
        weight: `[channels, width]`; width from `MIN_WIDTH` to `MAX_WIDTH`.
        bias: `[channels]` or None.
        rows: The last `width - 1` inputs. Row r is `[channels_per_row, width - 1]`, of x's dtype,
            and holds the channels from `r * channels_per_row` on.
        activation: One of `ACTIVATIONS`, applied after the bias.

    Returns:
        `[num_tokens, channels]`, contiguous, of x's dtype.

    Raises:
        ValueError: The tensors do not fit each other.
        IndexError: A table names a block that is not in the cache (CPU only).
    """
    channels, width = weight.shape
    if x.shape[1:] != (channels,):
        raise ValueError(f"x is {list(x.shape)}, but the weights have {channels} channels")
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ValueError(f"width {width} must be from {MIN_WIDTH} to {MAX_WIDTH}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} must be one of {ACTIVATIONS}")
    per_row = rows.state.shape[2]
    rows.check(-(-channels // per_row), (per_row, width - 1), x.dtype)
    return find_backend(x.device.type).causal_conv(x, weight, bias, rows, activation=activation)


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
    """Compute Mamba-2's state space model (Dao and Gu 2024, section 6).

    Each head has a state S `[head_dim, state_size]`. A token with inputs x and step size dt updates
    S to `exp(a * dt) * S + dt * outer(x, b)`, and returns `S @ c + d * x`. Head h reads the b and c
    of group `h // (heads // groups)`.

    A linear attention with a constant decay per head (lightning attention, Qin et al. 2024) is the
    case of x as values, b as keys, c as queries, dt = 1 and a = -decay rate.

    Args:
        x: `[num_tokens, heads, head_dim]`; tokens may be strided.
        dt: `[num_tokens, heads]`.
        a: `[heads]`, not positive.
        b: `[num_tokens, groups, state_size]`, of x's dtype; tokens may be strided.
        c: `[num_tokens, groups, state_size]`, of x's dtype; tokens may be strided.
        rows: Row h is head h's state, float32.
        d: `[heads]`; None is zeros.
        dt_bias: `[heads]`, added to dt; None is zeros.
        dt_softplus: Whether dt is then replaced by `log(1 + exp(dt))`.
        dt_limits: The range that dt is then clamped to, in prefill and in decode.

    Returns:
        `[num_tokens, heads, head_dim]`, contiguous, of x's dtype.

    Raises:
        ValueError: The tensors do not fit each other.
        IndexError: A table names a block that is not in the cache (CPU only).
    """
    num_tokens, heads, head_dim = x.shape
    groups, state_size = b.shape[1:]
    if heads % groups or c.shape != b.shape or len(b) != num_tokens or x.dtype != b.dtype:
        raise ValueError(f"b and c, {list(b.shape)} and {list(c.shape)}, do not fit {heads} heads")
    _check(x, dt=(dt, (num_tokens, heads)), a=(a, (heads,)), d=(d, (heads,)))
    _check(x, dt_bias=(dt_bias, (heads,)))
    rows.check(heads, (head_dim, state_size), torch.float32)
    return find_backend(x.device.type).ssd(
        x,
        dt,
        a,
        b,
        c,
        rows,
        d=d,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limits=dt_limits,
    )


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
    """Compute the gated delta rule (Gated DeltaNet, Yang et al. 2024, section 3.1).

    Each head has a state S `[key_dim, value_dim]`. A token decays it to `S' = exp(g) * S`, and
    adds `outer(key, beta * (value - key @ S'))`. The result is `scale * query @ S`.

    Args:
        query: `[num_tokens, key_heads, key_dim]`; tokens may be strided.
        key: `[num_tokens, key_heads, key_dim]`, of the query's dtype; tokens may be strided.
        value: `[num_tokens, value_heads, value_dim]`, of the query's dtype; tokens may be strided.
            Head h reads the key head `h // (value_heads // key_heads)`.
        g: `[num_tokens, value_heads]`, or `[num_tokens, value_heads, key_dim]` for a decay per row
            of S (Kimi Delta Attention, Kimi Linear 2025, section 3). Logarithms, not positive.
        beta: `[num_tokens, value_heads]`.
        rows: Row h is head h's state, float32.
        scale: Factor of queries.
        normalize: Whether queries and keys are first divided by their length,
            `sqrt(sum(x * x) + 1e-6)`.

    Returns:
        `[num_tokens, value_heads, value_dim]`, contiguous, of the value's dtype.

    Raises:
        ValueError: The tensors do not fit each other.
        IndexError: A table names a block that is not in the cache (CPU only).
    """
    num_tokens, key_heads, key_dim = key.shape
    value_heads, value_dim = value.shape[1:]
    if value_heads % key_heads:
        raise ValueError(f"{value_heads} value heads cannot be shared by {key_heads} key heads")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value are {query.dtype}, {key.dtype}, {value.dtype}")
    per_head = (num_tokens, value_heads)
    _check(key, query=(query, (num_tokens, key_heads, key_dim)), beta=(beta, per_head))
    _check(
        key,
        value=(value, (*per_head, value_dim)),
        g=(g, per_head if g.dim() == 2 else (*per_head, key_dim)),
    )
    rows.check(value_heads, (key_dim, value_dim), torch.float32)
    return find_backend(value.device.type).gated_delta(
        query, key, value, g, beta, rows, scale=scale, normalize=normalize
    )


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
    """Compute Mamba's selective state space model (Gu and Dao 2023, section 3).

    Each channel has a state h `[state_size]`. A token updates h to `exp(dt * a) * h + dt * x * b`,
    and returns `h @ c + d * x`.

    Args:
        x: `[num_tokens, channels]`; tokens may be strided.
        dt: `[num_tokens, channels]`; tokens may be strided.
        a: `[channels, state_size]`, not positive.
        b: `[num_tokens, state_size]`, of x's dtype; tokens may be strided.
        c: `[num_tokens, state_size]`, of x's dtype; tokens may be strided.
        rows: Row r is `[channels_per_row, state_size]` float32: the states of the channels from
            `r * channels_per_row` on.
        d: `[channels]`; None is zeros.
        dt_bias: `[channels]`, added to dt; None is zeros.
        dt_softplus: Whether dt is then replaced by `log(1 + exp(dt))`.

    Returns:
        `[num_tokens, channels]`, contiguous, of x's dtype.

    Raises:
        ValueError: The tensors do not fit each other.
        IndexError: A table names a block that is not in the cache (CPU only).
    """
    channels, state_size = a.shape
    num_tokens = len(x)
    if not x.dtype == b.dtype == c.dtype:
        raise ValueError(f"x, b and c are {x.dtype}, {b.dtype} and {c.dtype}")
    _check(x, x=(x, (num_tokens, channels)), dt=(dt, (num_tokens, channels)))
    _check(x, b=(b, (num_tokens, state_size)), c=(c, (num_tokens, state_size)))
    _check(x, d=(d, (channels,)), dt_bias=(dt_bias, (channels,)))
    per_row = rows.state.shape[2]
    rows.check(-(-channels // per_row), (per_row, state_size), torch.float32)
    return find_backend(x.device.type).selective_scan(
        x, dt, a, b, c, rows, d=d, dt_bias=dt_bias, dt_softplus=dt_softplus
    )


def _check(like: Tensor, **tensors: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError if a tensor is not of its shape or on the device of `like`."""
    for name, (tensor, shape) in tensors.items():
        if tensor is not None and (tensor.shape != shape or tensor.device != like.device):
            raise ValueError(
                f"{name} is {list(tensor.shape)} on {tensor.device}, but must be {list(shape)} on"
                f" {like.device}"
            )
