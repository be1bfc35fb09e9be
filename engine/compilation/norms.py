"""Replaces each RMSNorm in a traced step by one operator: `octavo::rms_norm`.

In PyTorch an RMSNorm is seven operators, each with a pass over memory.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from octavo.engine.compilation.trace import VALUES, call
from octavo.engine.operators import define

aten = torch.ops.aten
TYPES = torch.bfloat16, torch.float32
"""Types of rows and weights that the kernel takes."""


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, rounds_first: bool) -> Tensor:
    """Divide each row by its root mean square (Zhang and Sennrich, 2019): `octavo::rms_norm`.

    Args:
        x: `[..., width]` bfloat16 or float32, the last dimension contiguous.
        weight: `[width]` of one of these types: factors of the normed row.
        epsilon: Term added to the mean square.
        rounds_first: Whether the row is also rounded to the type of `x` before multiplying.

    Returns:
        `[..., width]` of the type of `x`, contiguous.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        normed = (normed.to(x.dtype) if rounds_first else normed) * weight
    return normed.to(x.dtype).contiguous()


RMS_NORM = define(
    "rms_norm(Tensor x, Tensor? weight, float epsilon, bool rounds_first) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
    CPU=rms_norm,
)


@dataclass(slots=True)
class _Norm:
    """A norm in the graph.

    Attributes:
        x: Its rows.
        epsilon: The operator's argument.
        result: The node of its result so far.
        weight: The operator's argument; None if no weights multiply it.
        rounds_first: The operator's argument.
    """

    x: fx.Node
    epsilon: float
    result: fx.Node
    weight: fx.Node | None = None
    rounds_first: bool = False


def join_norms(graph: fx.Graph) -> None:
    """Replace each RMSNorm of a trace by one operator.

    Args:
        graph: The trace's graph; changed in place.
    """
    for root in graph.find_nodes(op="call_function", target=aten.rsqrt.default):
        norm = _begin(root)
        if norm is None:
            continue
        _follow(norm)
        if _fits(norm):
            _join(graph, norm)
    graph.eliminate_dead_code()


def _join(graph: fx.Graph, norm: _Norm) -> None:
    """Replace a norm by the operator, with the same memory layout."""
    values: tuple[Tensor, ...] = norm.result.meta[VALUES]
    order = sorted(range(values[0].dim()), key=lambda i: -values[0].stride()[i])
    laid_out = tuple(value.permute(order) for value in values)
    if order[-1] != len(order) - 1 or not all(value.is_contiguous() for value in laid_out):
        return
    with graph.inserting_before(norm.result):
        rows = call(graph, aten.permute.default, norm.x, order)
        made = graph.call_function(RMS_NORM, (rows, norm.weight, norm.epsilon, norm.rounds_first))
        made.meta[VALUES], made.meta["val"] = laid_out, laid_out[0]
        back = [order.index(i) for i in range(len(order))]
        result = call(graph, aten.permute.default, made, back)
    norm.result.replace_all_uses_with(result)


def _begin(root: fx.Node) -> _Norm | None:
    """Return the RMSNorm that a `rsqrt` is part of: `x * rsqrt(mean(x ** 2) + epsilon)`."""
    added = _call(root.args[0], aten.add.Tensor)
    mean = None if added is None else _call(added.args[0], aten.mean.dim)
    square = None if mean is None else _call(mean.args[0], aten.pow.Tensor_Scalar)
    product = _only_user(root, aten.mul.Tensor)
    if added is None or mean is None or square is None or product is None:
        return None
    wide: Any = square.args[0]
    epsilon: Any = added.args[1]
    if (
        square.args[1] != 2
        or mean.args[1:] != ([-1], True)
        or not isinstance(epsilon, float)
        or set(product.args) != {wide, root}
    ):
        return None
    copied = _call(wide, aten._to_copy.default)  # noqa: SLF001
    x: Any = wide if copied is None else copied.args[0]
    return _Norm(x, epsilon, product)


def _follow(norm: _Norm) -> None:
    """Extend a norm by the rounding after it, and the weights that multiply it."""
    narrow = norm.x.meta["val"].dtype
    rounded = _rounding(norm.result, narrow)
    if rounded is not None:
        norm.result, norm.rounds_first = rounded, True
    product = _only_user(norm.result, aten.mul.Tensor)
    if product is None:
        return
    (weight,) = [argument for argument in product.args if argument is not norm.result] or [None]
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return
    values = weight.meta["val"]
    if values.shape != norm.x.meta["val"].shape[-1:] or values.dtype not in TYPES:
        return
    if product.meta["val"].dtype == narrow:
        norm.result, norm.weight = product, weight
    elif not norm.rounds_first and (rounded := _rounding(product, narrow)) is not None:
        norm.result, norm.weight = rounded, weight


def _fits(norm: _Norm) -> bool:
    """Return whether the operator supports a norm and computes the same."""
    x = norm.x.meta["val"]
    return x.dtype in TYPES and x.stride(-1) == 1 and norm.result.meta["val"].dtype == x.dtype


def _rounding(node: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """Return a node's only use, if it rounds the node to a type."""
    user = _only_user(node, aten._to_copy.default)  # noqa: SLF001
    return user if user is not None and user.meta["val"].dtype == dtype else None


def _only_user(node: fx.Node, target: object) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _call(node: object, target: object) -> fx.Node | None:
    return node if isinstance(node, fx.Node) and node.target is target else None
