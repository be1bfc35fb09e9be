"""Finds patterns in a step's graph, as `capture` makes it."""

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx import Graph
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

Node = Any  # of torch.fx; what its arguments are is not said there


def matches(graph: Graph, pattern: Callable[..., Node]) -> dict[Node, list[Node]]:
    """What a pattern's parameters match, by the node of its result.

    Args:
        graph: to look in.
        pattern: parameters match anything; what is between them and the result has no
            other use.
    """
    matcher = SubgraphMatcher(fx.symbolic_trace(pattern).graph)
    return {match.returning_nodes[0]: match.placeholder_nodes for match in matcher.match(graph)}
