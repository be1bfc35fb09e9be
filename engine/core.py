"""The core loop: take commands, schedule, execute, tell; once per step.

It runs in a thread of its own and owns scheduler, cache and executor. Others
reach it by commands, which it takes between steps, and hear from it by
`deliver`.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue

import structlog

from octavo.engine.events import Event, Failure, FailureCode, Load, Output, PrefixChange, Started
from octavo.engine.metrics import EngineMetrics
from octavo.engine.pipeline import Pipeline, StepError
from octavo.engine.running.executor import Executor
from octavo.engine.scheduling.batch import Batch, StepResult
from octavo.engine.scheduling.beam_search import BeamState
from octavo.engine.scheduling.request import FinishReason, Request
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.scheduling.sequence import GroupState, Moment, Sequence, SequenceGroup

log = structlog.get_logger(__name__)

Command = Callable[[], None]
Deliver = Callable[[list[Event], Load], None]
Publish = Callable[[PrefixChange], None]
OnEnd = Callable[[SequenceGroup, str], None]

HEARTBEAT_SECONDS = 1.0
"""An idle core tells its load this often: silence for longer means that it hangs."""
MAX_FAILED_STEPS = 3
"""Failed steps in a row after which the core ends, by default."""
PREFILL_SHARE = 0.5
"""A step tells the speed of prefill if more than this share of its tokens is prefill."""


class EngineFailedError(Exception):
    """The engine cannot compute any more: its process must end, and be started again."""


class EngineCore:
    """Everything that happens between steps and in them.

    Attributes:
        load: as of the last step; read from any thread.
        reported: when it last told its load, by the monotonic clock; read from any thread.
            It does so in every step, and once a second where there is none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        metrics: EngineMetrics,
        deliver: Deliver,
        *,
        max_waiting: int,
        max_failed_steps: int = MAX_FAILED_STEPS,
        ahead: bool = False,
        publish: Publish = lambda _: None,
        on_end: OnEnd | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._pipeline = Pipeline(scheduler, executor, ahead=ahead)
        self._metrics = metrics
        self._deliver = deliver
        self._publish = publish
        self._on_end = on_end
        self._max_waiting = max_waiting
        self._max_failed_steps = max_failed_steps
        self._failed_steps = 0  # in a row
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._groups: dict[tuple[int, str], SequenceGroup] = {}
        self._events: list[Event] = []
        self._ids = count()
        self._step_seconds = 0.0
        self._draining = False
        self._stopped = False
        self.reported = time.monotonic()
        self.load = self._measure_load()
        metrics.show(lambda: self.load)

    # Commands, from any thread.

    def submit(self, request: Request) -> None:
        """Queues a request; its events follow."""
        self._commands.put(partial(self._submit, request))

    def abort(self, session: int, request_id: str, index: int | None) -> None:
        """Stops a request or one of its outputs; nothing more is told of it."""
        self._commands.put(partial(self._abort, session, request_id, index))

    def open_session(self, session: int) -> None:
        """Tells a session what the prefix cache holds, and, as to all, the load."""
        self._commands.put(partial(self._open_session, session))

    def close_session(self, session: int) -> None:
        """Stops all requests of a session."""
        self._commands.put(partial(self._close_session, session))

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self._commands.put(self._drain)

    def stop(self) -> None:
        """Ends `run` before its next step; requests left fail with UNAVAILABLE."""
        self._commands.put(self._stop)

    @property
    def idle(self) -> bool:
        """Whether no request is left; a request just submitted may not count yet."""
        return not self._groups

    # The loop.

    def run(self) -> None:
        """Serves until `stop`.

        However it ends, requests that are left fail with UNAVAILABLE.

        Raises:
            EngineFailedError: the device is lost, or too many steps in a row failed.
        """
        self.reported = time.monotonic()
        try:
            while not self._stopped:
                self._take_commands()
                self._expire()
                if self._working and not self._stopped:
                    self._step()
                if self._scheduler.idle:
                    self._tell()  # else the next step does, while the model runs
        finally:
            for group in list(self._groups.values()):
                self._fail(group, FailureCode.UNAVAILABLE, "the engine stopped; try again")
            self._tell()

    @property
    def _working(self) -> bool:
        return self._pipeline.running or not self._scheduler.idle

    def _take_commands(self) -> None:
        """Does all commands that wait; waits a while for one if there is nothing else to do."""
        idle = not self._working and not self._use_idle_time()
        try:
            command = self._commands.get(idle, HEARTBEAT_SECONDS)
            while True:
                command()
                command = self._commands.get_nowait()
        except Empty:
            pass

    def _use_idle_time(self) -> bool:
        """Does what would slow steps down, until a command comes, and not for long.

        Returns:
            Whether some of it is left.
        """
        until = time.monotonic() + HEARTBEAT_SECONDS / 2
        while self._commands.empty() and time.monotonic() < until:
            if not self._executor.cache.populate():
                return False
        return True

    def _step(self) -> None:
        try:
            done = self._pipeline.step(scheduled=self._announce, launching=self._tell)
        except StepError as error:
            batch = error.batch
            log.exception("step failed", tokens=batch.num_tokens, sequences=len(batch.slices))
            self._fail_step()
            self._check_health(error)
            return
        if done is None:
            return
        self._failed_steps = 0
        self._step_seconds = done.seconds
        self._report(done.result)
        self._report_searches(done.batch)
        self._learn(done.batch)
        self._metrics.observe_step(
            done.batch,
            done.seconds,
            compiled=self._executor.compiled,
            eager_steps=self._executor.eager_steps,
        )

    def _announce(self, batch: Batch) -> None:
        """Says of requests that are computed for the first time that they started."""
        now = time.monotonic()
        for part in batch.slices:
            group, request = part.group, part.group.request
            if group.announced:
                continue
            group.announced = True
            group.note(Moment.PREFILL)
            self._metrics.queue_seconds.observe(now - request.arrival)
            self._metrics.prompt_tokens.inc(len(request.prompt))
            self._metrics.cached_tokens.inc(group.cached_tokens)
            self._events.append(Started(request.session, request.request_id, group.cached_tokens))

    def _report(self, result: StepResult) -> None:
        for draw in result.draws:
            group, sequence = draw.group, draw.sequence
            first = sequence.num_drawn == 1 and sequence.index == 0
            self._events.append(
                Output(
                    group.request.session,
                    group.request.request_id,
                    sequence.index,
                    [draw.token_id],
                    draw.logprob,
                    group.prompt_logprobs if first else [],
                    sequence.finish_reason,
                )
            )
        for group in dict.fromkeys(draw.group for draw in result.draws):
            if not group.decoding:
                group.decoding = True
                group.note(Moment.DECODE)
            if not group.live:
                self._forget(group, "finished")
        self._metrics.output_tokens.inc(len(result.draws) + len(result.continuations))

    def _report_searches(self, batch: Batch) -> None:
        """Tells of beam searches that ended with this step: every output, best first."""
        for group in dict.fromkeys(part.group for part in batch.slices):
            if group.beam is None or group.state is not GroupState.FINISHED:
                continue
            request = group.request
            for rank, found in enumerate(group.beam.hypotheses):
                self._events.append(
                    Output(
                        request.session,
                        request.request_id,
                        rank,
                        found.token_ids,
                        None,
                        [],
                        request.finish_reason(found.token_ids[-1], len(found.token_ids)),
                        found.score,
                    )
                )
            self._forget(group, "finished")

    def _learn(self, batch: Batch) -> None:
        """Keeps the rates that the preemption policy compares."""
        policy = self._scheduler.preemption
        for copied in self._executor.take_copy_times():
            policy.observe_transfer(copied.blocks, copied.seconds)
        swapped = batch.transfers.swap_out or batch.transfers.swap_in  # which slows the step
        if not swapped and batch.num_tokens - len(batch.slices) > PREFILL_SHARE * batch.num_tokens:
            policy.observe_prefill(batch.num_tokens, self._step_seconds)

    def _tell(self) -> None:
        self.reported = time.monotonic()
        self.load = self._measure_load()
        self._metrics.observe_counters(self._scheduler)
        stored, evicted = self._scheduler.cache.take_changes()
        if stored or evicted:
            self._publish(PrefixChange(None, stored, evicted))
        events, self._events = self._events, []
        self._deliver(events, self.load)

    def _measure_load(self) -> Load:
        scheduler = self._scheduler
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            swapped=len(scheduler.swapped),
            cache=scheduler.cache.stats,
            step_seconds=self._step_seconds,
            draining=self._draining,
        )

    # Commands, in the core's thread.

    def _submit(self, request: Request) -> None:
        key = request.session, request.request_id
        failure = None
        if self._draining:
            failure = FailureCode.UNAVAILABLE, "the engine is draining; try another"
        elif key in self._groups:
            failure = FailureCode.ALREADY_EXISTS, f"request_id {request.request_id!r} is running"
        elif len(self._scheduler.waiting) >= self._max_waiting:
            failure = FailureCode.RESOURCE_EXHAUSTED, f"{self._max_waiting} requests wait already"
        if failure:
            self._events.append(Failure(*key, *failure))
            return
        sequences = [
            self._begin(request, i) for i in range(1 if request.beam else request.sampling.n)
        ]
        beam = BeamState(request.beam) if request.beam else None
        group = SequenceGroup(request, sequences, beam=beam)
        self._groups[key] = group
        self._scheduler.submit(group)

    def _begin(self, request: Request, index: int) -> Sequence:
        """An output's sequence: as if preempted, where another engine has begun it."""
        tokens, reason = list(request.prompt), None
        if (resumed := request.resume.get(index)) is not None:
            tokens += resumed.token_ids
            reason = FinishReason.ABORTED if resumed.finished else None
        return Sequence(next(self._ids), index, tokens, len(request.prompt), finish_reason=reason)

    def _abort(self, session: int, request_id: str, index: int | None) -> None:
        group = self._groups.get((session, request_id))
        if group is None or (group.beam and index is not None):
            return  # a search has no outputs to stop before it ends
        for sequence in group.live:
            if index is None or sequence.index == index:
                self._scheduler.finish(group, sequence, FinishReason.ABORTED)
        if not group.live:
            self._forget(group, "aborted" if index is None else "finished")

    def _open_session(self, session: int) -> None:
        self._publish(PrefixChange(session, frozenset(self._scheduler.cache.published), ()))

    def _close_session(self, session: int) -> None:
        for group in [g for g in self._groups.values() if g.request.session == session]:
            self._abort(session, group.request.request_id, None)

    def _drain(self) -> None:
        self._draining = True

    def _stop(self) -> None:
        self._stopped = True

    # Ends.

    def _expire(self) -> None:
        """Fails requests past their deadline."""
        now = time.monotonic()
        late = [
            group
            for group in self._groups.values()
            if group.request.deadline is not None and group.request.deadline < now
        ]
        for group in late:
            self._fail(group, FailureCode.DEADLINE_EXCEEDED, "the deadline passed")

    def _fail_step(self) -> None:
        """Fails all that had K/V or a token coming: nothing of a broken step can be trusted."""
        coming = [g for g in self._scheduler.waiting if any(s.num_pending for s in g.sequences)]
        for group in [*self._scheduler.running, *self._scheduler.swapped, *coming]:
            self._fail(group, FailureCode.INTERNAL, "the model failed on this batch; try again")
        self._scheduler.cache.forget_contents()

    def _check_health(self, error: StepError) -> None:
        """Decides after a failed step whether the next one can succeed.

        Raises:
            EngineFailedError: it cannot, or too many in a row have failed.
        """
        self._failed_steps += 1
        if self._executor.device_lost():
            raise EngineFailedError("the device is lost: every later step would fail") from error
        if self._failed_steps >= self._max_failed_steps:
            raise EngineFailedError(f"{self._failed_steps} steps in a row failed") from error

    def _fail(self, group: SequenceGroup, code: FailureCode, message: str) -> None:
        self._scheduler.remove(group)
        request = group.request
        self._events.append(Failure(request.session, request.request_id, code, message))
        self._forget(group, code.name.lower())

    def _forget(self, group: SequenceGroup, outcome: str) -> None:
        request = group.request
        del self._groups[request.session, request.request_id]
        self._metrics.requests.labels(outcome).inc()
        if self._on_end is not None:
            self._on_end(group, outcome)
        log.info(
            "request ended",
            request_id=request.request_id,
            outcome=outcome,
            output_tokens=sum(sequence.num_output for sequence in group.sequences),
        )
