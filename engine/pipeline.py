"""Steps, one after the other; on a GPU each is launched before the one before it is done.

Else the GPU would wait while the host learns what a step drew, tells it, schedules the
next step and lays it out. What a step computes hangs on how many tokens each sequence
has, hardly ever on which: those are put in on the device. A sequence that ended with a
token that nobody knew yet is computed once more in vain.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.engine.running.executor import Executor
from octavo.engine.running.pending_step import Launched
from octavo.engine.scheduling.batch import Batch, StepResult
from octavo.engine.scheduling.scheduler import Scheduler


class StepError(Exception):
    """The executor failed on a step.

    Attributes:
        batch: what it was to compute.
    """

    def __init__(self, batch: Batch) -> None:
        super().__init__("step failed")
        self.batch = batch


@dataclass(frozen=True, slots=True)
class Done:
    """A step that is done.

    Attributes:
        batch: what it computed.
        result: what that gave, without what was drawn in vain.
        seconds: from its beginning, or the end of the one before it.
    """

    batch: Batch
    result: StepResult
    seconds: float


@dataclass(frozen=True, slots=True)
class _Running:
    batch: Batch
    launched: Launched
    began: float


class Pipeline:
    """Schedules steps, has them run and books what they draw.

    Args:
        scheduler: makes the batches.
        executor: runs them.
        ahead: whether a step is launched before the one before it is done: for executors
            whose steps go on by themselves.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, ahead: bool = False) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._ahead = ahead
        self._running: _Running | None = None
        self._ended = 0.0

    @property
    def running(self) -> bool:
        """Whether a step was launched and its result not taken."""
        return self._running is not None

    def step(
        self,
        *,
        scheduled: Callable[[Batch], None] = lambda _: None,
        launching: Callable[[], None] = lambda: None,
    ) -> Done | None:
        """Launches the next step, if there is anything to compute, and takes a result.

        Args:
            scheduled: called with the step's batch before it is launched.
            launching: as in `Executor.launch`.

        Returns:
            The step that is done by now: none, if that was the first of several.

        Raises:
            StepError: this step failed, or the one before it. What they were to draw stays
                pending, and nothing is running any more.
        """
        before = self._running
        if before is not None and not _foreseeable(before.batch):
            return self._take()
        began = time.perf_counter()
        batch = self._scheduler.schedule()
        if not batch:
            return self._take() if before else None
        scheduled(batch)
        after = before.launched if before else None
        with self._failing(batch):
            launched = self._executor.launch(batch, after=after, launching=launching)
        self._scheduler.book(batch)
        done = self._take() if before else None
        self._running = _Running(batch, launched, began)
        return done if before or self._ahead else self._take()

    @contextmanager
    def _failing(self, batch: Batch) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._running = None
            raise StepError(batch) from error

    def _take(self) -> Done:
        """Waits for the step that runs."""
        assert self._running is not None
        running, self._running = self._running, None
        with self._failing(running.batch):
            result = running.launched.result()
        result.draws = self._scheduler.update(running.batch, result)
        began, self._ended = max(running.began, self._ended), time.perf_counter()
        return Done(running.batch, result, self._ended - began)


def _foreseeable(batch: Batch) -> bool:
    """Whether the step after it can be made without knowing what it draws."""
    return not any(
        group.beam or group.request.sampling.penalised or group.wants_prompt_logprobs
        for group in (part.group for part in batch.slices)
    )
