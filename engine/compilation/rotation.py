"""Fuses the rotation of queries and keys into attention's write to the cache.

Inductor alone would recompute sines and cosines for every head of every layer. Here they are
computed once, in float32, rounded as in the model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx import Graph
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

from octavo.engine.compilation.trace import call

Node = Any  # a torch.fx.Node, with untyped arguments
aten = torch.ops.aten
octavo = torch.ops.octavo

END = (1 << 63) - 1
"""Value of a slice's end if it has none."""


def matches(graph: Graph, pattern: Callable[..., Node]) -> dict[Node, list[Node]]:
    """Return the nodes that match a pattern's parameters, by the node of its result.

    Args:
        graph: The graph to search.
        pattern: The pattern. Its parameters match any node; inner nodes must have no other use.
    """
    matcher = SubgraphMatcher(fx.symbolic_trace(pattern).graph)
    return {match.returning_nodes[0]: match.placeholder_nodes for match in matcher.match(graph)}


def _rotated(x: Node, cos: Node, sin: Node, half: int) -> Node:
    turned = aten.cat.default(
        [aten.neg.default(aten.slice.Tensor(x, 3, half, END)), aten.slice.Tensor(x, 3, 0, half)],
        -1,
    )
    return aten.add.Tensor(aten.mul.Tensor(x, cos), aten.mul.Tensor(turned, sin))


def fuse_rotary_embeddings(graph: Graph) -> None:
    """Fuse rotations in the form of most transformers decoders.

    Args:
        graph: A captured step's graph; changed in place.
    """
    rotations = matches(graph, _rotated)
    angles: dict[Node, Node] = {}  # as arguments of attention
    for attention in graph.find_nodes(op="call_function", target=octavo.paged_attention.default):
        queries, keys = (rotations.get(_heads(tokens)) for tokens in attention.args[:2])
        if queries is None or keys is None:
            continue
        (query, cos, sin, half), (key, *same) = queries, keys
        if (
            same != [cos, sin, half]
            or 2 * half != query.meta["val"].shape[-1]
            or not all(map(_is_doubled, (cos, sin)))
        ):
            continue
        both = [_angle(node) for node in (cos, sin)]
        for angle in both:
            if angle not in angles:
                angles[angle] = _in_float32(graph, angle)
        with graph.inserting_before(attention):
            raw = [
                call(graph, aten.transpose.int, call(graph, aten.select.int, heads, 0, 0), 0, 1)
                for heads in (query, key)
            ]
        attention.args = (*raw, *attention.args[2:10], *(angles[angle] for angle in both))
    graph.eliminate_dead_code()
    graph.lint()


def _heads(tokens: Node) -> Node | None:
    """Return the `[1, heads, tokens, head_dim]` behind attention's argument, which is a view."""
    if tokens.target is not aten.transpose.int or tokens.args[1:] != (0, 1):
        return None
    selected = tokens.args[0]
    if selected.target is not aten.select.int or selected.args[1:] != (0, 0):
        return None
    return selected.args[0]


def _angle(node: Node) -> Node | None:
    """Return the `[1, tokens, head_dim]` angles that are broadcast over heads."""
    whole = node.target is aten.unsqueeze.default and node.args[1] == 1
    return node.args[0] if whole else None


def _is_doubled(node: Node) -> bool:
    """Return whether the second half of the angles equals the first half."""
    angle = _angle(node)
    while angle is not None and angle.target is not aten.cat.default:
        if angle.target not in {
            *(aten.to.dtype, aten._to_copy.default, aten.mul.Tensor),  # noqa: SLF001
            *(aten.cos.default, aten.sin.default),
        }:
            return False
        if any(isinstance(other, fx.Node) for other in angle.args[1:]):
            return False
        angle = angle.args[0]
    return angle is not None and len(angle.args[0]) == 2 and len(set(angle.args[0])) == 1


def _in_float32(graph: Graph, angle: Node) -> Node:
    """Return angles as `[tokens, head_dim]` float32, rounded as in the model."""
    with graph.inserting_after(angle):
        wide = graph.call_function(aten.to.dtype, (angle, torch.float32))
    with graph.inserting_after(wide):
        return graph.call_function(aten.select.int, (wide, 0, 0))
