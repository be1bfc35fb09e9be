"""Balancing policies, which choose a request's engine: one policy per file."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from octavo.router.balancing.least_loaded import LeastLoaded
from octavo.router.balancing.policy import Policy
from octavo.router.balancing.prefix_aware import PrefixAware
from octavo.router.balancing.round_robin import RoundRobin

POLICIES: dict[str, Callable[[], Policy]] = {
    "prefix_aware": PrefixAware,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
"""Each policy by its name, a value of --balancing."""

if TYPE_CHECKING:  # mypy cannot read a computed Literal
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICIES)]
