"""Replaces LayerNorm and GELU in a traced step by operators in C++: `octavo::layer_norm`, `gelu`.

PyTorch's operators use threads even for a few rows, and each of them splits the sequence of the
engine's operators, which otherwise runs without Python.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from octavo.engine.compilation.trace import VALUES
from octavo.engine.operators import define

aten = torch.ops.aten
TYPES = torch.bfloat16, torch.float32
"""Types of rows, weights and biases that the kernels take."""


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """Norm each row of a contiguous tensor; weights and bias have its type."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


LAYER_NORM = define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float epsilon) -> Tensor",
    lambda x, *_: torch.empty_like(x),
    CPU=layer_norm,
)
GELU = define(
    "gelu(Tensor x, bool tanh) -> Tensor",
    lambda x, _: torch.empty_like(x),
    CPU=lambda x, tanh: functional.gelu(x, approximate="tanh" if tanh else "none"),
)


def join_layer_norms(graph: fx.Graph) -> None:
    """Replace each LayerNorm and GELU of a trace whose rows the kernels take.

    Args:
        graph: The trace's graph; changed in place.
    """
    for norm in graph.find_nodes(op="call_function", target=aten.native_layer_norm.default):
        x, shape, weight, bias, epsilon = norm.args
        used = [user for user in norm.users if user.users]
        if len(shape) == 1 and all(user.args[1] == 0 for user in used):
            for user in used:
                _replace(graph, user, LAYER_NORM, (x, weight, bias, epsilon))
    for gelu in graph.find_nodes(op="call_function", target=aten.gelu.default):
        tanh = gelu.kwargs.get("approximate") == "tanh"
        _replace(graph, gelu, GELU, (gelu.args[0], tanh))
    graph.eliminate_dead_code()


def _replace(
    graph: fx.Graph, node: fx.Node, operator: torch._ops.OpOverload, args: tuple[Any, ...]
) -> None:
    """Replace a node by an operator's call, if all its tensors have one of the types alike."""
    tensors = [each for each in args if isinstance(each, fx.Node)]
    dtypes = {each.meta["val"].dtype for each in tensors}
    values: tuple[Tensor, ...] = tensors[0].meta.get(VALUES, ())
    if (
        not values
        or len(dtypes) > 1
        or not dtypes <= {*TYPES}
        or not all(x.is_contiguous() for x in values)
    ):
        return
    with graph.inserting_before(node):
        made = graph.call_function(operator, args)
    made.meta[VALUES], made.meta["val"] = node.meta[VALUES], node.meta["val"]
    node.replace_all_uses_with(made)
