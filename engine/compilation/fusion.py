"""Fuses norms, residuals and rotations into the CPU kernels.

Inductor compiles each of these to a loop, with a fork and a join of the threads. In a kernel they
cost little more than their memory accesses: in a step of 48 sequences of SmolLM2-135M, everything
but products and attention takes 4.1 ms instead of 11.6. Residuals and norms are rounded where the
model rounds them.

Graphs unlike those of most transformers decoders are left to inductor.
"""

import torch
from torch import fx
from torch.fx import Graph

from octavo.engine.compilation.rotation import Node, fuse_rotary_embeddings, matches
from octavo.engine.models.linear import packed_linear

aten = torch.ops.aten


def fuse(graph: Graph) -> None:
    """Fuse what can be fused.

    Args:
        graph: A captured step's graph of aten's and Octavo's operators; changed in place.
    """
    _fuse_residuals(graph)
    _fuse_norms(graph)
    fuse_rotary_embeddings(graph)  # last, as it removes unused nodes


def _rms_norm(x: Node, weight: Node, epsilon: float) -> Node:
    wide = aten.to.dtype(x, torch.float32)
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(wide, 2), [-1], True)
    normed = aten.mul.Tensor(wide, aten.rsqrt.default(aten.add.Tensor(mean, epsilon)))
    return aten.mul.Tensor(weight, aten.to.dtype(normed, torch.bfloat16))


def _fuse_norms(graph: Graph) -> None:
    """Fuse norms into the linear layers that use them, if nothing else does."""
    for normed, (x, weight, epsilon) in matches(graph, _rms_norm).items():
        rows = list(normed.users)
        linears = [user for row in rows for user in row.users]
        if (
            any(row.target is not aten.reshape.default for row in rows)
            or any(_norm_index(linear) is None for linear in linears)
            or not _are_bfloat16(x, weight)
        ):
            continue
        for row in rows:
            row.replace_input_with(normed, x)
        for linear in linears:
            _set(linear, 0, weight)
            _set(linear, 1, epsilon)


def _fuse_residuals(graph: Graph) -> None:
    """Fuse residuals into the linear layers that they are added to."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    for added in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        for outputs, residual in (added.args, added.args[::-1]):
            if not isinstance(outputs, fx.Node) or not isinstance(residual, fx.Node):
                continue
            linear = outputs.args[0] if outputs.target is aten.reshape.default else None
            if (
                not isinstance(linear, fx.Node)
                or _norm_index(linear) is None
                or linear.args[_index(linear, "gated") or 0]
                or len(outputs.users) > 1
                or len(linear.users) > 1
                or places[residual] > places[linear]
                or not _are_bfloat16(residual)
                or residual.meta["val"].shape != outputs.meta["val"].shape
            ):
                continue
            with graph.inserting_before(linear):
                rows = graph.call_function(aten.reshape.default, (residual, [-1, linear.args[1]]))
            _set(linear, 2, rows)
            added.replace_all_uses_with(outputs)
            break


def _norm_index(node: Node) -> int | None:
    """Return a linear layer's index of the arguments norm, epsilon and residual, if it has them."""
    return _index(node, "norm") if node.target in packed_linear.OPERATORS else None


def _index(node: Node, name: str) -> int | None:
    """Return the index of an operator's argument, if it has it."""
    names = [given.name for given in node.target._schema.arguments]  # noqa: SLF001
    return names.index(name) if name in names else None


def _set(linear: Node, which: int, value: object) -> None:
    """Set a linear layer's norm (0), epsilon (1) or residual (2)."""
    own = _norm_index(linear)
    assert own is not None
    fused = [*linear.args[own:], *(None, 0.0, None)[len(linear.args) - own :]]
    fused[which] = value
    linear.args = (*linear.args[:own], *fused)


def _are_bfloat16(*nodes: Node) -> bool:
    return all(node.meta["val"].dtype == torch.bfloat16 for node in nodes)
