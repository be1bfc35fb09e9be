"""One step: schedule, prepare, launch, sample, collect, update."""

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.engine.core.masks import Masks, late_masks
from octavo.engine.core.reporting import Reporter
from octavo.engine.running.executor import Executor, LaunchedModel
from octavo.engine.running.pending_step import PendingStep
from octavo.engine.scheduling.batch import Batch, SamplerOutput
from octavo.engine.scheduling.scheduler import Scheduler


class StepError(Exception):
    """The executor failed on a step.

    Attributes:
        batch: The step's batch.
    """

    def __init__(self, batch: Batch) -> None:
        super().__init__("step failed")
        self.batch = batch


class Steps:
    """Computes one step after the other.

    Attributes:
        pending: The step that was launched and is not collected yet; None without one.
        stalled: Whether the last step did nothing, because all groups wait for masks.
        num_failed: Number of failed steps in a row, counted by the loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        masks: Masks,
        reporter: Reporter,
        *,
        async_scheduling: bool,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._masks = masks
        self._reporter = reporter
        self._async_scheduling = async_scheduling
        self.pending: PendingStep | None = None
        self.stalled = False
        self.num_failed = 0

    def step(self) -> SamplerOutput | None:
        """Compute one step: schedule, prepare, launch, sample, collect, update.

        With async scheduling, a step is launched before the tokens of the step before it are
        collected, so the device does not wait for the host: what a step computes depends on
        how many tokens each sequence has, rarely on which (`Batch.can_overlap`). A sequence
        that ends with a token that was not known yet is computed once too often, and the
        token of that is dropped.

        Returns:
            The output of the step that was collected, without dropped tokens; None if the first
            of several steps was launched.

        Raises:
            StepError: The executor failed.
        """
        previous, launched, output = self.pending, None, None
        self._masks.begin_step()
        batch = self._schedule(previous)
        if batch:
            model = self._launch(batch, previous)
            # A constraint's masks follow from the tokens of the step before, which are collected
            # first. All others are sampled now: a GPU goes on without the host.
            if not batch.constrained:
                launched = self._sample(model)
        if previous is not None:
            output = self._collect(previous)
        self._masks.wait()
        if batch and launched is None:
            launched = self._sample(model)
        self.stalled = previous is None and not batch and self._scheduler.waits_for_masks
        if self._async_scheduling:
            self.pending = launched
        elif launched is not None:
            output = self._collect(launched)
        return output

    def _schedule(self, previous: PendingStep | None) -> Batch:
        """Schedule a step; an empty one if it must know the tokens of the step before."""
        if previous is not None:
            batch, scheduler = previous.batch, self._scheduler
            masks = scheduler.can_recompute or not batch.constrained
            if not (batch.can_overlap and masks) or scheduler.waits_to_draft(batch):
                return Batch()
        return self._scheduler.schedule()

    def _launch(self, batch: Batch, previous: PendingStep | None) -> LaunchedModel:
        """Prepare a step's inputs, publish the events of the steps before, and run the model."""
        self._reporter.report_starts(batch)
        with _step_errors(batch):
            inputs = self._executor.prepare(batch, previous)
            # The event loop sends the messages while the model runs: a model lets other threads
            # have the interpreter, which the rest of a step holds.
            self._reporter.publish()
            late = None
            if not self._async_scheduling:
                # On a CPU the model needs the cores that compute the masks.
                self._masks.wait()
                late = late_masks(batch)
            return self._executor.launch(batch, inputs, late)

    def _sample(self, model: LaunchedModel) -> PendingStep:
        """Sample a step's tokens, of those sequences whose masks are ready."""
        batch = model.batch
        # A mask is late if it was when it was read: here, or by the model that took the tokens.
        late = late_masks(batch) if model.token_ids is None else model.late
        with _step_errors(batch):
            launched = self._executor.sample(model, late)
        self._scheduler.advance(batch, late)
        return launched

    def _collect(self, done: PendingStep) -> SamplerOutput:
        """Collect a step's tokens and update their sequences."""
        with _step_errors(done.batch):
            output = done.collect()
        self._scheduler.update(done.batch, output)
        self._masks.request(done.batch)
        self._reporter.report_outputs(output)
        self._reporter.measure(done.batch, self._executor)
        self.num_failed = 0
        return output


@contextmanager
def _step_errors(batch: Batch) -> Iterator[None]:
    """Raise whatever the executor raises as a `StepError`."""
    try:
        yield
    except Exception as error:
        raise StepError(batch) from error
