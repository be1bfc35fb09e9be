"""The scheduler's counters."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Preemptions and drafted tokens since the start, for metrics and tests.

    Attributes:
        preemptions_swap: Groups swapped out.
        preemptions_recompute: Groups dropped, to be recomputed.
        swap_space_full: Groups dropped because swap space had no room for them.
        swap_ins: Groups swapped in.
        drafted_tokens: Drafted tokens that were verified.
        accepted_tokens: Drafted tokens that were right.
    """

    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    swap_space_full: int = 0
    swap_ins: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
