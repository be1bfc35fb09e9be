"""Which engine takes a request: one policy a file, chosen by name."""

from collections.abc import Callable
from typing import Literal

from octavo.router.balancing.least_loaded import LeastLoaded
from octavo.router.balancing.policy import Policy
from octavo.router.balancing.prefix_aware import PrefixAware
from octavo.router.balancing.round_robin import RoundRobin

PolicyName = Literal["prefix_aware", "least_loaded", "round_robin"]

POLICIES: dict[PolicyName, Callable[[], Policy]] = {
    "prefix_aware": PrefixAware,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
