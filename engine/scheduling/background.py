"""Bounds what background requests add to the time of a step beside others.

A background request has the lowest priority, such as one of a batch. Alone they fill the steps;
beside others, a step computes so many of their tokens that it takes about twice as long at most:
their decodes and their prefill each add half of the time that the others' decodes take.
"""

import sys

import numpy as np

from octavo.common.sampling_parameters import MAX_PRIORITY
from octavo.engine.kv_cache import KVCacheManager, Span
from octavo.engine.scheduling.chunks import Counts, next_spans
from octavo.engine.scheduling.sequence import SequenceGroup
from octavo.engine.scheduling.swap_or_recompute import PreemptionPolicy
from octavo.engine.speculation.policy import StepTimes

SHARE = 0.5
"""Time that background decodes add to a step, as a share of the other decodes' time; likewise for
background prefill."""
UNLIMITED = sys.maxsize


class Background:
    """The background requests of a scheduler, and what the next step may compute of them.

    Attributes:
        groups: Their unfinished groups.
        limited: Whether the step is shared with other requests.
        decodes: Number of further groups that the step may compute.
        prefill: Number of further prefill tokens that the step may compute.
        paused: Running groups that the step does not compute, in order.
    """

    def __init__(self, policy: PreemptionPolicy, min_prefill: int) -> None:
        """Begin without requests.

        Args:
            policy: Knows the speed of prefill.
            min_prefill: Minimum prefill tokens of a step, so that they continue.
        """
        self.groups: set[SequenceGroup] = set()
        self.limited = False
        self.decodes = self.prefill = UNLIMITED
        self.paused: list[SequenceGroup] = []
        self._policy = policy
        self._min_prefill = min_prefill
        self._times = StepTimes()

    def add(self, group: SequenceGroup) -> None:
        """Add a new group if it is a background request."""
        if group.request.priority <= -MAX_PRIORITY:
            self.groups.add(group)

    @property
    def full(self) -> bool:
        """Whether the step takes no further group of them."""
        return self.decodes < 1 or self.prefill < 1

    def take(self, group: SequenceGroup) -> None:
        """Count a group that begins or returns in this step, if it is one of them."""
        if group in self.groups:
            self.decodes -= group.num_slots

    def observe_decodes(self, tokens: int, seconds: float) -> None:
        """Record the duration of a step of `tokens` decodes, without a prefill."""
        self._times.observe(tokens, seconds)

    def begin_step(self, running: list[SequenceGroup], others: int) -> None:
        """Set the next step's limits.

        Args:
            running: All running groups.
            others: Number of unfinished groups that are no background requests.
        """
        self.paused = []
        self.decodes = self.prefill = UNLIMITED
        self.limited = bool(self.groups) and others > 0
        if not self.limited:
            return
        others_running = (group for group in running if group not in self.groups)
        decodes = sum(g.num_slots for g in others_running if g.sequences[0].num_output)
        seconds = self._times(np.arange(decodes, 2 * decodes + len(self.groups) + 1))
        allowed = (1 + SHARE) * seconds[0]
        self.decodes = max(1, int(np.searchsorted(seconds, allowed, "right")) - 1)
        rate = self._policy.prefill_seconds(1)
        if rate is not None:
            self.prefill = max(self._min_prefill, int(SHARE * seconds[0] / rate))

    def choose(self, running: list[SequenceGroup]) -> list[SequenceGroup]:
        """Return the running groups that the step computes, and pause the rest.

        Args:
            running: The running groups that the step may compute, in order.
        """
        if not self.limited:
            return running
        chosen = []
        for group in running:
            if group in self.groups and self.decodes < 1:
                self.paused.append(group)
            else:
                self.take(group)
                chosen.append(group)
        return chosen

    def next_spans(
        self, group: SequenceGroup, counts: Counts, budget: int, cache: KVCacheManager
    ) -> tuple[list[Span], int]:
        """Return the tokens of any group to compute, and their share of the prefill budget."""
        if group not in self.groups:
            return next_spans(counts, budget, cache)
        spans, used = next_spans(counts, min(budget, self.prefill), cache)
        self.prefill -= used
        return spans, used
