"""Definitions of PyTorch operators in the namespace `octavo`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library, register_fake

_library = Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(
    schema: str,
    fake: Callable[..., Tensor],
    *,
    writes: bool = False,
    native: bool = False,
    **implementations: Callable[..., Any],
) -> OpOverload:
    """Define an operator, which a captured graph of a model has as one call.

    Args:
        schema: Its name, arguments and result, as PyTorch writes them.
        fake: Returns an uninitialized result for the same arguments.
        writes: Whether it writes memory that is not an argument. Then no call may be dropped or
            merged.
        native: Whether its kernel on CPUs is the operator of the same name and arguments in C++.
        **implementations: Functions by PyTorch's dispatch key, such as `CUDA`.
    """
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    for key, function in implementations.items():
        _library.impl(name, function, key)  # type: ignore[no-untyped-call]
    register_fake(f"octavo::{name}", fake)
    operator: OpOverload = getattr(torch.ops.octavo, name).default
    if native:
        from octavo.kernels import cpu  # noqa: PLC0415 - it compiles the kernels

        cpu.implement(operator)
    if writes:
        torch.fx.node.has_side_effect(operator)
    return operator
