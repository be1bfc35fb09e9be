"""Products of rows with the experts that they are routed to, for a compiled step.

For weights that are not bfloat16, transformers' experts call its own operator in Python when they
are captured, which a compiled library cannot call. PyTorch's kernel supports these types too; only
its shape function, made for GPUs, refuses them. So the operator here is that kernel with another
shape function. Its name gives the compiler the same C function.
"""

import torch
from torch import Tensor
from torch.fx import Graph
from torch.library import Library, register_fake

FALLBACK = "transformers.grouped_mm_fallback.default"
"""The operator in Python. Its arguments are the first three of PyTorch's."""


def call_grouped_products(graph: Graph) -> None:
    """Replace the operator in Python by PyTorch's kernel.

    Args:
        graph: A captured step's graph; changed in place.
    """
    for node in graph.nodes:
        if str(node.target) == FALLBACK:
            node.target = GROUPED_PRODUCT
            node.args, node.kwargs = (*node.args, *node.kwargs.values(), None, None), {}


def _multiply(
    rows: Tensor, weights: Tensor, ends: Tensor, bias: Tensor | None, dtype: torch.dtype | None
) -> Tensor:
    """Multiply each group of rows by its own weights: `octavo::_grouped_mm`.

    Args:
        rows: `[rows, inputs]`, in the order of the groups.
        weights: `[groups, inputs, outputs]`.
        ends: `[groups]` int32, the end of each group's rows.
        bias: None.
        dtype: None.

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
GROUPED_PRODUCT = torch.ops.octavo._grouped_mm.default  # noqa: SLF001
"""The operator here."""
