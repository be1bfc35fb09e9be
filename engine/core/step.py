"""One step: schedule, prepare, launch, sample, collect, update."""

import time
from collections import deque
from collections.abc import Callable

import structlog

from octavo.engine.core.masks import Masks
from octavo.engine.core.requests import Requests
from octavo.engine.events import FailureCode
from octavo.engine.execution.executor import Executor
from octavo.engine.execution.failures import EngineFailedError, StepError, step_errors
from octavo.engine.execution.pending_step import PendingStep
from octavo.engine.metrics import EngineMetrics
from octavo.engine.scheduling.batch import Batch, Samples
from octavo.engine.scheduling.image_encodes import readers
from octavo.engine.scheduling.in_flight import count_in_flight
from octavo.engine.scheduling.progress import advance, update
from octavo.engine.scheduling.scheduler import Scheduler

log = structlog.get_logger(__name__)


class Steps:
    """Computes one step after another.

    Attributes:
        pending: The launched step that is not collected yet, or None.
        in_flight: Launched steps that other stages still compute, the earliest first.
        stalled: Whether the last step did nothing because all groups wait for masks.
        seconds: Duration of the last step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        masks: Masks,
        requests: Requests,
        *,
        metrics: EngineMetrics,
        publish: Callable[[], None],
        async_scheduling: bool,
        max_failed: int,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._masks = masks
        self._requests = requests
        self._metrics = metrics
        self._publish = publish
        self._async_scheduling = async_scheduling
        self._max_failed = max_failed
        self._num_failed = 0  # consecutive
        self._ended = 0.0
        self.seconds = 0.0
        self.pending: PendingStep | None = None
        self.in_flight: deque[PendingStep] = deque()
        self.stalled = False

    def step(self) -> Samples | None:
        """Compute one step: schedule, prepare, launch, sample, collect, update.

        With async scheduling, a step is launched before the previous step's tokens are collected,
        so the device does not wait for the host: a step depends on the number of each sequence's
        tokens, rarely on their ids (`Batch.can_overlap`). A sequence that ends with an unknown
        token is computed once too often, and the extra token is dropped.

        Returns:
            The output of the collected step, without dropped tokens; None if the first of several
            steps was launched.

        Raises:
            StepError: The executor failed.
        """
        if self._scheduler.stages > 1:
            return self._step_of_stages()
        previous = self.pending
        launched: PendingStep | None = None
        output: Samples | None = None
        self._masks.begin_step()
        # It may need the previous step's tokens.
        now = previous is None or self._scheduler.can_overlap(previous.batch)
        batch = self._scheduler.schedule() if now else Batch()
        constrained = bool(batch.constrained)
        if batch:
            launched = self._launch(batch, previous)
            if not constrained:
                self._sample(launched)
        if previous is not None:
            output = self._collect(previous)
        # A mask depends on the previous token, which is collected only now. So sequences without
        # masks are sampled above: the device continues while the host collects.
        self._masks.wait()
        if launched is not None and constrained:
            self._sample(launched)
        self.stalled = previous is None and not batch and self._scheduler.waits_for_masks
        if self._async_scheduling:
            self.pending = launched
        elif launched is not None:
            output = self._collect(launched)
        return output

    def _step_of_stages(self) -> Samples | None:
        """Launch a step; collect the earliest if as many are in flight as there are stages.

        Each step has other groups, so that no stage waits for the tokens of another step.
        """
        self._masks.begin_step()
        batch = self._scheduler.schedule()
        if batch:
            launched = self._launch(batch, None)
            count_in_flight(batch, 1)
            self.in_flight.append(launched)
        self.stalled = not self.in_flight and self._scheduler.waits_for_masks
        if not self.in_flight or (batch and len(self.in_flight) < self._scheduler.stages):
            return None
        done = self.in_flight.popleft()
        count_in_flight(done.batch, -1)
        self._sample(done)
        return self._collect(done)

    def _launch(self, batch: Batch, previous: PendingStep | None) -> PendingStep:
        """Prepare a step's inputs, publish earlier steps' events, and run the model."""
        self._requests.report_starts(batch)
        with step_errors(batch):
            inputs = self._executor.prepare(batch, previous)
            # The event loop sends the messages while the model runs: the model releases the
            # interpreter's lock, which the rest of a step holds.
            self._publish()
            late = None
            if not self._async_scheduling:
                # On a CPU the model needs the cores that compute the masks.
                self._masks.wait()
                late = batch.late
            launched = self._executor.launch(batch, inputs, late)
        done, failed = self._executor.take_images()
        self._scheduler.images.finish(done, failed)
        if failed:
            why = "the model's vision encoder failed on an image"
            for group in readers(self._scheduler.running, self._scheduler.cache, failed):
                self._requests.fail(group, FailureCode.INTERNAL, why)
        spilled = batch.spilled
        if spilled is not None and self._executor.spill_failed():
            why = "the file of --kv-spill cannot be read or written"
            self._requests.fail(spilled[1].group, FailureCode.INTERNAL, why)
        return launched

    def _sample(self, step: PendingStep) -> None:
        """Sample a step's tokens for the sequences whose masks are ready."""
        # A mask not ready when read is late: here, or in a model that samples itself.
        late = step.batch.late if step.greatest is None else step.late
        with step_errors(step.batch):
            self._executor.sample(step, late)
        advance(self._scheduler, step.batch, late)

    def _collect(self, done: PendingStep) -> Samples:
        """Collect a step's tokens and update their sequences."""
        with step_errors(done.batch):
            output = done.collect()
        update(self._scheduler, done.batch, output)
        self._masks.request(done.batch)
        self._requests.report_outputs(output)
        self._measure(done.batch)
        self._num_failed = 0
        return output

    def _measure(self, batch: Batch) -> None:
        """Update the metrics, and the rates that the preemption policy compares."""
        now, executor = time.perf_counter(), self._executor
        self.seconds = now - max(batch.created, self._ended)
        self._ended = now
        self._scheduler.observe_step(batch, self.seconds, executor.take_copy_times())
        compiled, eager_steps = executor.compiled, executor.eager_steps
        self._metrics.observe_step(batch, self.seconds, compiled=compiled, eager_steps=eager_steps)

    def fail(self, error: StepError) -> None:
        """Fail the requests that a failed step may have harmed.

        These are all with K/V, whose contents are now unknown, or that await a launched step's
        output.

        Raises:
            EngineFailedError: No later step can succeed, or too many consecutive steps have failed.
        """
        batch, scheduler = error.batch, self._scheduler
        tokens, sequences = batch.num_tokens, batch.num_sequences
        log.error("step failed", tokens=tokens, sequences=sequences, exc_info=error)
        self.pending = None
        self.in_flight.clear()
        begun = [group for group in scheduler.waiting if group.awaits_output]
        for group in [*scheduler.running, *scheduler.swapped, *begun]:
            why = "the model failed on this batch; try again"
            self._requests.fail(group, FailureCode.INTERNAL, why)
        scheduler.cache.forget_contents()
        scheduler.images.forget()
        self._num_failed += 1
        if self._executor.device_lost():
            raise EngineFailedError("the device is lost: every later step would fail") from error
        if self._num_failed >= self._max_failed:
            raise EngineFailedError(f"{self._num_failed} steps in a row failed") from error
