"""Finds patterns in a captured step's graph."""

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx import Graph
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

Node = Any  # a torch.fx.Node, with untyped arguments


def matches(graph: Graph, pattern: Callable[..., Node]) -> dict[Node, list[Node]]:
    """Return the nodes that a pattern's parameters match, by the node of its result.

    Args:
        graph: The graph to search.
        pattern: Its parameters match any node; nodes between them and the result must have no
            other use.
    """
    matcher = SubgraphMatcher(fx.symbolic_trace(pattern).graph)
    return {match.returning_nodes[0]: match.placeholder_nodes for match in matcher.match(graph)}
