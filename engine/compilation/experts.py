"""Products of rows with the experts that they are routed to, as a compiled step can call them.

For weights that are not bfloat16, transformers' experts call an operator of its own, in Python,
when they are captured: a compiled library could not. PyTorch's kernel takes these types as well;
only its shape function, made for GPUs, refuses them. So the operator here is that kernel by
another name, which gives the compiler the name of the same C function.
"""

import torch
from torch import Tensor
from torch.fx import Graph
from torch.library import Library, register_fake

FALLBACK = "transformers.grouped_mm_fallback.default"
"""The operator in Python; its arguments are the first three of the other's."""


def call_grouped_products(graph: Graph) -> None:
    """Have a step call PyTorch's kernel in place of the operator in Python.

    Args:
        graph: a step's, as captured; changed in place.
    """
    for node in graph.nodes:
        if str(node.target) == FALLBACK:
            node.target = torch.ops.octavo._grouped_mm.default  # noqa: SLF001
            node.args, node.kwargs = (*node.args, *node.kwargs.values(), None, None), {}


def _multiply(
    rows: Tensor, weights: Tensor, ends: Tensor, bias: Tensor | None, dtype: torch.dtype | None
) -> Tensor:
    """`octavo::_grouped_mm`: multiplies each group of rows by the weights of its own.

    Args:
        rows: `[rows, inputs]`, in the order of the groups.
        weights: `[groups, inputs, outputs]`.
        ends: `[groups]` int32, where each group's rows end.
        bias: none.
        dtype: none.

    Returns:
        `[rows, outputs]`.
    """
    return torch._grouped_mm(rows, weights, offs=ends, bias=bias, out_dtype=dtype)  # noqa: SLF001


_library = Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "_grouped_mm(Tensor self, Tensor mat2, Tensor? offs, Tensor? bias, ScalarType? out_dtype)"
    " -> Tensor"
)
_library.impl("_grouped_mm", _multiply, "CPU")  # type: ignore[no-untyped-call]
register_fake(
    "octavo::_grouped_mm",
    lambda rows, weights, *_: rows.new_empty(rows.shape[0], weights.shape[2]),
)
