"""Whose a request is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody whose requests are counted together.

    Attributes:
        name: Unique; empty for those who need not say who they are.
        weight: Its share of the engines beside the other tenants', when all
            want more than there is.
    """

    name: str = ""
    weight: float = 1.0


ANONYMOUS = Tenant()
