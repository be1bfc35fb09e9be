"""Balancing policies, which choose a request's engine: one policy per file."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from octavo.router.balancing.least_loaded import least_loaded
from octavo.router.balancing.policy import Policy
from octavo.router.balancing.prefix_aware import prefix_aware
from octavo.router.balancing.round_robin import RoundRobin

POLICIES: dict[str, Callable[[], Policy]] = {
    "prefix_aware": lambda: prefix_aware,
    "least_loaded": lambda: least_loaded,
    "round_robin": RoundRobin,
}
"""Factories of the policies, by name; the names are the values of --balancing."""

if TYPE_CHECKING:  # mypy cannot read a computed Literal
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICIES)]
