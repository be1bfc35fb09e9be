"""The time that a rank spends on communication."""

from dataclasses import dataclass


@dataclass(slots=True)
class Times:
    """The time that a rank spent on communication, in seconds.

    Attributes:
        broadcast: Time in messages of rank 0; on other ranks, mostly waiting for work.
        reduce: Time in all-reduces of layers.
        gather: Time in gathering logits or tokens on rank 0.
    """

    broadcast: float = 0.0
    reduce: float = 0.0
    gather: float = 0.0
