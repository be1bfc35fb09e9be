"""Replacements of transformers' functions that update states, over the paged cache.

The modules of Mamba, gated delta rules and short convolutions call functions in their source files;
this module replaces these. Within `attending`, the replacements call Octavo's operators; elsewhere,
as in a reference run, they call transformers' own functions.
"""

# The arguments are those of transformers.
# ruff: noqa: PLR0917

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.engine.attention import state_operators  # noqa: F401 - defines the operators
from octavo.engine.attention.operator import any_step

Function = Callable[..., Any]
CONVOLUTION, SSD, SCAN = "causal_conv1d_fn", "mamba2_chunk_scan", "mamba_selective_scan"
DELTAS = "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"

Recorder = Callable[[str, dict[str, Any]], Any]
"""Replaces a function: takes its name and its arguments by name, and returns a similar result."""


class _Calls(threading.local):
    """The states of the module running in this thread."""

    numbers: Iterator[int] = iter(())
    recorder: Recorder | None = None


_calls = _Calls()


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Call `recorder` in place of each function."""
    _calls.recorder = recorder
    try:
        yield
    finally:
        _calls.recorder = None


UNNUMBERED = "octavo_unnumbered"
"""Attribute of a numbered forward: the module's own."""


def number_states(module: nn.Module, numbers: Sequence[int]) -> None:
    """Assign these states to the calls of a module's forward, in order, instead of earlier ones."""
    forward = getattr(module.forward, UNNUMBERED, module.forward)

    @functools.wraps(forward)
    def run(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - whatever the module takes
        outer, _calls.numbers = _calls.numbers, iter(numbers)
        try:
            return forward(*arguments, **keywords)
        finally:
            _calls.numbers = outer

    setattr(run, UNNUMBERED, forward)
    module.forward = run


def replace_functions(model: nn.Module) -> None:
    """Replace the functions in the source files of a model's modules, once per file."""
    for source in {type(module).__module__ for module in model.modules()}:
        file = sys.modules[source]
        for name, ours in _FUNCTIONS.items():
            theirs = getattr(file, name, None)
            if theirs is not None and not hasattr(theirs, "octavo"):
                setattr(file, name, _either(name, ours, theirs))


def _either(name: str, ours: Function, theirs: Function) -> Function:
    @functools.wraps(theirs)
    def call(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - as transformers'
        if _calls.recorder is not None:
            return _calls.recorder(name, _bound(theirs, arguments, keywords))
        return (theirs if any_step() is None else ours)(*arguments, **keywords)

    call.octavo = True  # type: ignore[attr-defined]
    return call


def _bound(
    function: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> dict[str, Any]:
    names = inspect.signature(function).parameters
    return dict(zip(names, arguments, strict=False)) | keywords


def _convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,  # noqa: ANN401 - not used without a mask
) -> Tensor:
    """Replace `causal_conv1d_fn`: `[1, channels, num_tokens]`."""
    x = hidden_states[0].transpose(0, 1)
    number = next(_calls.numbers)
    bias = None if bias is None else bias.to(weight.dtype)
    out: Tensor = torch.ops.octavo.causal_conv(
        *(_dense(x), weight.contiguous(), bias, number), activation == "silu"
    )
    return out.transpose(0, 1).unsqueeze(0)


def _ssd(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - transformers' name
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,  # noqa: ARG001
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,  # noqa: ANN401
) -> Tensor:
    """Replace `mamba2_chunk_scan`: `[1, num_tokens, heads, head_dim]`."""
    least, most = dt_limit
    out: Tensor = torch.ops.octavo.ssd(
        *(_dense(hidden_states[0]), _floats(dt[0]), _floats(A), _dense(B[0]), _dense(C[0])),
        *(next(_calls.numbers), _floats(D), _floats(dt_bias), dt_softplus, least, most),
    )
    return out.unsqueeze(0)


def _gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Replace the functions of `DELTAS`: `[1, num_tokens, heads, dim]`."""
    out = torch.ops.octavo.gated_delta(
        *(_dense(query[0]), _dense(key[0]), _dense(value[0]), _floats(g[0]), _floats(beta[0])),
        *(next(_calls.numbers), key.shape[-1] ** -0.5, use_qk_l2norm_in_kernel),
    )
    return out.unsqueeze(0), None


def _scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,  # noqa: ANN401
) -> Tensor:
    """Replace `mamba_selective_scan`: `[1, channels, num_tokens]`."""
    x, steps, b, c = (_dense(tensor[0].transpose(0, 1)) for tensor in (hidden_states, dt, B, C))
    out: Tensor = torch.ops.octavo.selective_scan(
        *(x, steps, _floats(A), b.to(x.dtype), c.to(x.dtype), next(_calls.numbers)),
        *(_floats(D), _floats(delta_bias), delta_softplus),
    )
    out = out.transpose(0, 1).unsqueeze(0)
    return out if z is None else out * nn.functional.silu(z)


def _dense(x: Tensor) -> Tensor:
    """Return a tensor whose tokens are contiguous: itself, or a copy."""
    return x if x[:1].is_contiguous() else x.contiguous()


def _floats(x: Tensor | None) -> Tensor | None:
    """Return a contiguous float32 tensor: itself, or a copy."""
    return None if x is None else x.float().contiguous()


_FUNCTIONS: dict[str, Function] = {
    CONVOLUTION: _convolve,
    SSD: _ssd,
    **dict.fromkeys(DELTAS, _gated_delta),
    SCAN: _scan,
}
