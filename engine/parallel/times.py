"""The time that a rank spends on communication."""

from dataclasses import dataclass


@dataclass(slots=True)
class Times:
    """The time that a rank spent on communication, in seconds.

    Attributes:
        broadcast: Time in messages of rank 0; on other ranks, mostly waiting for work.
        reduce: Time in all-reduces of layers.
        gather: Time in gathering logits or tokens on rank 0, with the wait for later stages.
        receive: Time in receiving hidden states, with the wait for the previous stage.
        send: Time in sending hidden states.
    """

    broadcast: float = 0.0
    reduce: float = 0.0
    gather: float = 0.0
    receive: float = 0.0
    send: float = 0.0
