"""The C++ operators of layers that keep a state, for calls outside of traced steps."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.state_rows import StateRows


class StateKernels:
    """The kernels of `octavo.kernels.states`, in C++. Several threads may call them.

    Args:
        set_states: Sets the states of a batch, whose number is 0, for this thread's next operator;
            returns the memory that must outlive it.
    """

    def __init__(self, set_states: Callable[[StateRows], object]) -> None:
        self._set_states = set_states

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: StateRows,
        *,
        activation: str | None = None,
    ) -> Tensor:
        """Convolve each channel over its latest inputs; see `octavo.kernels.states`."""
        x, weight = _tokens(x), weight.contiguous()
        bias = None if bias is None else bias.to(weight.dtype).contiguous()
        return self._run("causal_conv", rows, [x, weight, bias, 0, activation == "silu"])

    def ssd(  # noqa: PLR0917
        self,
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
        inputs = [_tokens(x), _floats(dt), _floats(a), _tokens(b), _tokens(c)]
        skips = [_floats(d), _floats(dt_bias), dt_softplus]
        return self._run("ssd", rows, [*inputs, 0, *skips, *dt_limits])

    def gated_delta(  # noqa: PLR0917
        self,
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
        inputs = [_tokens(query), _tokens(key), _tokens(value), _floats(g), _floats(beta)]
        return self._run("gated_delta", rows, [*inputs, 0, scale, normalize])

    def selective_scan(  # noqa: PLR0917
        self,
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
        inputs = [_tokens(x), _tokens(dt), _floats(a), _tokens(b), _tokens(c)]
        skips = [_floats(d), _floats(dt_bias), dt_softplus]
        return self._run("selective_scan", rows, [*inputs, 0, *skips])

    def _run(self, name: str, rows: StateRows, arguments: list[Any]) -> Tensor:
        kept = self._set_states(rows)
        out: Tensor = getattr(torch.ops.octavo_cpu, name)(*arguments)
        del kept
        return out


def _tokens(x: Tensor) -> Tensor:
    """Return a tensor whose tokens are contiguous: itself, or a copy."""
    inner = x.stride()[1:]
    dense = inner[-1] == 1 and (len(inner) == 1 or inner[0] == x.shape[2])
    return x if dense else x.contiguous()


def _floats(x: Tensor | None) -> Tensor | None:
    """Return a contiguous float32 tensor: itself, or a copy."""
    return None if x is None else x.to(torch.float32).contiguous()
