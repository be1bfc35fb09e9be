"""The masks of constrained sequences: requested after a step's tokens, read to sample the next.

A mask marks the tokens that a constraint allows next. It depends on the previous token, so other
threads (`MaskThreads`) can compute it only while the next step's model runs.
"""

from collections.abc import Callable

from octavo.engine.constraints.mask_threads import MaskThreads
from octavo.engine.metrics import EngineMetrics
from octavo.engine.scheduling.batch import Batch
from octavo.engine.scheduling.drafting import guess_constrained
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.scheduling.sequence import GroupState, SequenceGroup


class Masks:
    """Requests masks once a step's tokens are known, and waits for those that the next needs."""

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        fail: Callable[[SequenceGroup, str], None],
        on_late: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._fail = fail
        self._threads: MaskThreads[SequenceGroup] = MaskThreads(on_late)
        self._scheduling_needs_them = False

    def begin_step(self) -> None:
        """Fail requests that cannot continue, and wait for the masks that scheduling needs."""
        for group, fault in self._threads.failures():
            if group.state is not GroupState.FINISHED:
                self._fail(group, fault)
        if self._scheduling_needs_them:
            self.wait()

    def wait(self) -> None:
        """Wait for quick masks; sequences with late masks skip the step."""
        self._scheduling_needs_them = False
        if (waited := self._threads.wait()) is not None:
            seconds, late = waited
            self._metrics.mask_seconds.observe(seconds)
            self._metrics.late_masks.inc(late)

    def request(self, batch: Batch) -> None:
        """Request the masks after the tokens that a step has sampled.

        The next step is scheduled without them, unless its schedule depends on them: if a token
        cannot be recomputed, if only some beams of a search would advance, or if drafts come with
        the masks.
        """
        constrained = [g for g in batch.constrained if g.state is not GroupState.FINISHED]
        speculation = self._scheduler.speculation
        if constrained and speculation and not speculation.begin_step(batch.num_sequences):
            speculation = None
        for group in constrained:
            if group.beam is not None or not self._scheduler.can_recompute:
                self._scheduling_needs_them = True
            for sequence in group.live:
                matcher = sequence.matcher
                # Until it is ready, another thread advances it: its sequence got no token.
                if matcher is not None and matcher.ready and (new := sequence.unmatched):
                    guess = guess_constrained(speculation, group, sequence)
                    self._scheduling_needs_them |= guess.most > 0
                    self._threads.request(group, matcher, new, guess)
