"""The core loop: take commands, then compute one step, over and over.

It runs in a thread of its own and owns the scheduler, the cache and the executor. Other
threads send it commands, which it handles between steps, and receive events through
`publish`.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, zip_longest
from queue import Empty, SimpleQueue
from typing import assert_never

import numpy as np
import structlog

from octavo.engine.commands import (
    Abort,
    CloseSession,
    Command,
    Constrain,
    Drain,
    OpenSession,
    Stop,
    Submit,
    WakeUp,
)
from octavo.engine.constraints.compiler import (
    ConstraintCompiler,
    Outcome,
    Preparation,
    TokensMissingError,
)
from octavo.engine.constraints.constraint import Constraint, ConstraintError
from octavo.engine.constraints.mask_threads import MaskThreads
from octavo.engine.events import (
    Event,
    Failure,
    FailureCode,
    Load,
    NumberedTokens,
    OutputEvent,
    PrefixChange,
    Started,
)
from octavo.engine.metrics import EngineMetrics
from octavo.engine.running.executor import Executor, LaunchedModel
from octavo.engine.running.pending_step import PendingStep
from octavo.engine.scheduling.batch import Batch, SampledToken, SamplerOutput
from octavo.engine.scheduling.beam_search import BeamState
from octavo.engine.scheduling.drafting import guess_constrained
from octavo.engine.scheduling.request import FinishReason, Request
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.scheduling.sequence import (
    GroupEvent,
    GroupState,
    Sequence,
    SequenceGroup,
    TokenLogprob,
)
from octavo.engine.scheduling.steady import DecodedTokens

log = structlog.get_logger(__name__)

Publish = Callable[[list[Event], Load], None]
PublishPrefixes = Callable[[PrefixChange], None]
OnEnd = Callable[[SequenceGroup, str], None]

_Columns = defaultdict[int, tuple[list[int], list[int]]]
"""Numbers of outputs, and their tokens, by session."""

HEARTBEAT_SECONDS = 1.0
"""An idle core publishes its load this often: a longer silence means that it hangs."""
MAX_FAILED_STEPS = 3
"""Failed steps in a row after which the core ends, by default."""


class EngineFailedError(Exception):
    """The engine cannot compute any more: its process must end, and be started again."""


class StepError(Exception):
    """The executor failed on a step.

    Attributes:
        batch: what the step was to compute.
    """

    def __init__(self, batch: Batch) -> None:
        super().__init__("step failed")
        self.batch = batch


class EngineCore:
    """The engine's state and its loop.

    Attributes:
        load: as of the last step; read from any thread.
        reported: when the load was last published, in `time.monotonic()` seconds; read from any
            thread. The core publishes it in every step, and once a second while it is idle.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        metrics: EngineMetrics,
        publish: Publish,
        *,
        max_waiting: int,
        max_failed_steps: int = MAX_FAILED_STEPS,
        async_scheduling: bool = False,
        publish_prefixes: PublishPrefixes = lambda _: None,
        on_end: OnEnd | None = None,
        constraints: ConstraintCompiler | None = None,
    ) -> None:
        """Set up the core; `run` starts its loop.

        Args:
            scheduler: chooses what to compute.
            executor: computes it.
            metrics: counts it.
            publish: called with new events and the load.
            max_waiting: most requests that wait for admission.
            max_failed_steps: failed steps in a row after which the core ends.
            async_scheduling: launch each step before the tokens of the one before it are
                collected. For executors whose `launch` returns at once.
            publish_prefixes: called with changes of the prefix cache, before the events of the
                same step.
            on_end: called with each group that ended, and how it ended.
            constraints: compiles the constraints of requests; None if none is accepted.
        """
        self._scheduler = scheduler
        self._executor = executor
        self._metrics = metrics
        self._publish_events = publish
        self._publish_prefixes = publish_prefixes
        self._on_end = on_end
        self._constraints = constraints
        self._preparing: dict[SequenceGroup, Preparation] = {}  # whose constraint is compiled
        self._masks: MaskThreads[SequenceGroup] = MaskThreads(lambda: self.send(WakeUp()))
        self._masks_before_model = False
        self._stalled = False
        self._max_waiting = max_waiting
        self._max_failed_steps = max_failed_steps
        self._async_scheduling = async_scheduling
        self._pending: PendingStep | None = None
        self._failed_steps = 0  # in a row
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._groups: dict[tuple[int, str], SequenceGroup] = {}
        self._events: list[Event] = []
        self._next_deadline = math.inf  # no request's is earlier
        self._ids = count()
        self._step_ended = 0.0
        self._step_seconds = 0.0
        self._draining = False
        self._stopped = False
        self.reported = time.monotonic()
        self.load = self._measure_load()
        metrics.show(lambda: self.load)

    def send(self, command: Command) -> None:
        """Queue a command; call it from any thread."""
        self._commands.put(command)

    @property
    def idle(self) -> bool:
        """Whether no request is left; a request just submitted may not count yet."""
        return not self._groups

    @property
    def working(self) -> bool:
        """Whether `step` has something to do."""
        return self._pending is not None or not self._scheduler.idle

    # The loop.

    def run(self) -> None:
        """Serve until a `Stop`.

        However it ends, requests that are left fail with UNAVAILABLE.

        Raises:
            EngineFailedError: the device is lost, or too many steps in a row failed.
        """
        self.reported = time.monotonic()
        try:
            while not self._stopped:
                self._take_commands()
                self._expire()
                if self.working and not self._stopped:
                    try:
                        self.step()
                    except StepError as error:
                        self._fail_step(error)
                if self._scheduler.idle or self._stalled:
                    self._publish()  # else the next step does, while the model runs
        finally:
            if self._constraints is not None:
                self._constraints.close()
            for group in list(self._groups.values()):
                self._fail(group, FailureCode.UNAVAILABLE, "the engine stopped; try again")
            self._publish()

    def step(self) -> SamplerOutput | None:
        """Compute one step: schedule, prepare, publish, launch, sample, collect, update.

        With async scheduling, a step is launched before the tokens of the one before it are
        collected, so the device does not wait for the host: what a step computes depends on
        how many tokens each sequence has, rarely on which (`Batch.can_overlap`). A sequence
        that ends with a token that was not known yet is computed once too often, and the
        token of that is dropped.

        Returns:
            The output of the step that was collected, without dropped tokens; None where the
            first of several steps was launched.

        Raises:
            StepError: the executor failed.
        """
        previous, batch = self._pending, Batch()
        launched: PendingStep | None = None
        model: LaunchedModel | None = None
        self._fail_masks()
        if self._masks_before_model:
            self._await_masks()
        if previous is None or self._can_overlap(previous.batch):
            batch = self._scheduler.schedule()
        if batch:
            self._report_starts(batch)
            with _step_errors(batch):
                inputs = self._executor.prepare(batch, previous)
                self._publish()  # now: the event loop has the interpreter while the model runs
                late = None
                if not self._async_scheduling:
                    self._await_masks()  # the cores that compute them are those of the model
                    late = _late_masks(batch)
                model = self._executor.launch(batch, inputs, late)
        if model is not None and not batch.constrained:
            launched = self._sample(model)
        output = None if previous is None else self._take(previous)
        self._await_masks()  # which other threads compute while a GPU runs the model
        if model is not None and launched is None:
            launched = self._sample(model)
        self._stalled = previous is None and not batch and self._scheduler.waits_for_masks
        if self._async_scheduling:
            self._pending = launched
        elif launched is not None:
            output = self._take(launched)
        return output

    def _can_overlap(self, batch: Batch) -> bool:
        """Return whether a step can be launched before the tokens of the one before are known."""
        masks = self._scheduler.can_recompute or not batch.constrained
        return batch.can_overlap and masks and not self._scheduler.waits_to_draft(batch)

    def _sample(self, model: LaunchedModel) -> PendingStep:
        """Sample a step's tokens, of those sequences whose masks are ready."""
        batch = model.batch
        # A mask is late if it was when it was read: here, or by the model that took the tokens.
        late = _late_masks(batch) if model.token_ids is None else model.late
        with _step_errors(batch):
            launched = self._executor.sample(model, late)
        self._scheduler.advance(batch, late)
        return launched

    def _take(self, done: PendingStep) -> SamplerOutput:
        """Collect a step's tokens and give them to their sequences."""
        with _step_errors(done.batch):
            output = done.collect()
        self._scheduler.update(done.batch, output)
        self._request_masks(done.batch)
        self._report_outputs(output)
        self._measure_step(done.batch)
        return output

    # Masks of constrained sequences.

    def _request_masks(self, batch: Batch) -> None:
        """Have the masks computed that follow the tokens which a step has sampled.

        Where a token cannot be computed again, beams would advance without one of them, or drafts
        are made with the masks, the next step waits for these before it is scheduled.
        """
        if not batch.constrained:
            return
        speculation = self._scheduler.speculation
        if speculation is not None and not speculation.begin_step(batch.num_sequences):
            speculation = None
        for group in dict.fromkeys(scheduled.group for scheduled in batch.ruled):
            if group.request.constraint is None or group.state is GroupState.FINISHED:
                continue
            if group.beam is not None or not self._scheduler.can_recompute:
                self._masks_before_model = True
            for sequence in group.live:
                matcher = sequence.matcher
                assert matcher is not None
                if not matcher.ready:
                    continue  # it was late, and has got no token
                begin = sequence.num_prompt + matcher.length
                if new := sequence.token_ids[begin : sequence.num_known]:
                    guess = guess_constrained(speculation, group, sequence)
                    self._masks_before_model |= guess.most > 0
                    self._masks.request(group, matcher, new, guess)

    def _await_masks(self) -> None:
        """Wait for the masks that take little time; the others' sequences sit the step out."""
        self._masks_before_model = False
        if (waited := self._masks.wait()) is not None:
            self._metrics.mask_seconds.observe(waited.seconds)
            self._metrics.late_masks.inc(waited.late)

    def _fail_masks(self) -> None:
        """Fail the requests whose outputs cannot go on."""
        for failure in self._masks.failures():
            if failure.owner.state is not GroupState.FINISHED:
                code = FailureCode.INVALID_ARGUMENT
                self._fail(failure.owner, code, failure.message, "constraint")

    # Events and measures of a step.

    def _report_starts(self, batch: Batch) -> None:
        """Make a `Started` event for each request that is computed for the first time."""
        now = time.monotonic()
        for scheduled in batch.ruled:
            group, request = scheduled.group, scheduled.group.request
            if group.start_reported:
                continue
            group.start_reported = True
            group.record(GroupEvent.PREFILL)
            self._metrics.queue_seconds.observe(now - request.arrival)
            self._metrics.prompt_tokens.inc(len(request.prompt))
            self._metrics.cached_tokens.inc(group.cached_tokens)
            self._events.append(Started(request.session, request.request_id, group.cached_tokens))

    def _report_outputs(self, output: SamplerOutput) -> None:
        """Make the events of new tokens, and forget the groups that are finished."""
        columns: _Columns = defaultdict(lambda: ([], []))
        events = self._steady_events(output.steady, columns)
        events += self._ruled_events(output.tokens, columns)
        # Columns are first: what ends an output follows its tokens.
        self._events += [NumberedTokens(session, *each) for session, each in columns.items()]
        self._events += events
        finished = [s.group for s in output.tokens if s.group.state is GroupState.FINISHED]
        finished += [output.steady.decodes.groups[i] for i in output.steady.ends]
        for group in dict.fromkeys(finished):
            self._forget(group, "finished")
        for group in output.searches:
            assert group.beam is not None
            self._report_search(group, group.beam)
            self._forget(group, "finished")
        sampled = len(output.steady) + len(output.tokens) + len(output.continuations)
        self._metrics.output_tokens.inc(sampled)

    def _steady_events(self, tokens: DecodedTokens, columns: _Columns) -> list[Event]:
        """Put tokens of steady sequences into the columns of their sessions.

        Returns:
            Events of the tokens that end an output, and of outputs without a number.
        """
        decodes = tokens.decodes
        in_columns = decodes.numbers != 0
        in_columns[tokens.ends] = False
        token_ids = np.array(tokens.token_ids, np.int64)
        for session in set(decodes.sessions.tolist()):
            rows = np.flatnonzero(in_columns & (decodes.sessions == session))
            if len(rows):
                numbers, found = columns[session]
                numbers += decodes.numbers[rows].tolist()
                found += token_ids[rows].tolist()
        events: list[Event] = []
        for i in np.flatnonzero(~in_columns):
            sequence = decodes.sequences[i]
            sampled = SampledToken(decodes.groups[i], sequence, tokens.token_ids[i])
            events.append(_output_event(sampled, [], sequence.finish_reason, (0, 0)))
        return events

    def _ruled_events(self, tokens: list[SampledToken], columns: _Columns) -> list[Event]:
        """Do the same for the other tokens, which may come with log-probabilities or counts."""
        events: list[Event] = []
        for sampled, following in zip_longest(tokens, tokens[1:]):
            group, sequence, token_id, logprob = sampled
            request, scores = group.request, _scores_to_report(group, sequence)
            reason, counts = None, (0, 0)
            if following is None or following.sequence is not sequence:
                reason = sequence.finish_reason
                if sequence.drafted_tokens:
                    counts = sequence.take_draft_counts()
            more = logprob is not None or scores or reason is not None or counts[0]
            if request.first_number and not more:
                numbers, token_ids = columns[request.session]
                numbers.append(request.first_number + sequence.index)
                token_ids.append(token_id)
            else:
                events.append(_output_event(sampled, scores, reason, counts))
            if not group.decoding:
                group.decoding = True
                group.record(GroupEvent.DECODE)
        return events

    def _report_search(self, group: SequenceGroup, search: BeamState) -> None:
        """Make an event for each output of a beam search that ended, best first.

        A constraint may leave fewer than the search's width; then they are repeated.
        """
        request, width, count = group.request, search.params.width, len(search.hypotheses)
        hypotheses = [search.hypotheses[rank * count // width] for rank in range(width)]
        self._events += [
            OutputEvent(
                request.session,
                request.request_id,
                rank,
                found.token_ids,
                None,
                [],
                request.finish_reason(found.token_ids[-1], len(found.token_ids)),
                found.score,
            )
            for rank, found in enumerate(hypotheses)
        ]

    def _measure_step(self, batch: Batch) -> None:
        """Update the metrics, and the rates that the preemption policy compares."""
        self._failed_steps = 0
        now = time.perf_counter()
        self._step_seconds = now - max(batch.created, self._step_ended)
        self._step_ended = now
        policy = self._scheduler.policy
        for copied in self._executor.take_copy_times():
            policy.observe_transfer(copied.blocks, copied.seconds)
        self._scheduler.observe_step(batch, self._step_seconds)
        self._metrics.observe_step(
            batch,
            self._step_seconds,
            compiled=self._executor.compiled,
            eager_steps=self._executor.eager_steps,
        )

    def _publish(self) -> None:
        """Publish all events made since the last call, the load, and what the cache holds."""
        self.reported = time.monotonic()
        self.load = self._measure_load()
        self._metrics.observe_counters(self._scheduler)
        if self._constraints is not None:
            self._metrics.observe_constraints(self._constraints.counters)
        stored, evicted = self._scheduler.cache.take_changes()
        if stored or evicted:
            self._publish_prefixes(PrefixChange(None, stored, evicted))
        events, self._events = self._events, []
        self._publish_events(events, self.load)

    def _measure_load(self) -> Load:
        scheduler = self._scheduler
        return Load(
            running=len(scheduler.running),
            waiting=self._num_waiting,
            swapped=len(scheduler.swapped),
            cache=scheduler.cache.stats,
            step_seconds=self._step_seconds,
            draining=self._draining,
            drafted_tokens=scheduler.counters.drafted_tokens,
            accepted_tokens=scheduler.counters.accepted_tokens,
        )

    # Commands.

    def _take_commands(self) -> None:
        """Handle all commands that wait; wait a while for one if there is nothing else to do."""
        # While a constraint is compiled, a command may come at any moment.
        unused = not self.working and (bool(self._preparing) or not self._use_idle_time())
        idle = self._stalled or unused
        try:
            command = self._commands.get(idle, HEARTBEAT_SECONDS)
            while True:
                self.handle(command)
                command = self._commands.get_nowait()
        except Empty:
            pass

    def _use_idle_time(self) -> bool:
        """Do work that would slow steps down, until a command comes, and not for long.

        Returns:
            Whether some of it is left.
        """
        until = time.monotonic() + HEARTBEAT_SECONDS / 2
        while self._commands.empty() and time.monotonic() < until:
            if not self._executor.cache.populate():
                return False
        return True

    def handle(self, command: Command) -> None:
        """Handle a command; call it in the core's thread, between steps."""
        match command:
            case Submit(request):
                self._submit(request)
            case Constrain(group, outcome):
                self._constrain(group, outcome)
            case WakeUp():
                pass
            case Abort(session, request_id, index):
                self._abort(session, request_id, index)
            case OpenSession(session):
                stored = frozenset(self._scheduler.cache.published)
                self._publish_prefixes(PrefixChange(session, stored, ()))
            case CloseSession(session):
                for group in [g for g in self._groups.values() if g.request.session == session]:
                    self._abort(session, group.request.request_id, None)
            case Drain():
                self._draining = True
            case Stop():
                self._stopped = True
            case _:
                assert_never(command)

    def _submit(self, request: Request) -> None:
        key = request.session, request.request_id
        failure = None
        if self._draining:
            failure = FailureCode.UNAVAILABLE, "the engine is draining; try another"
        elif key in self._groups:
            failure = FailureCode.ALREADY_EXISTS, f"request_id {request.request_id!r} is running"
        elif self._num_waiting >= self._max_waiting:
            failure = FailureCode.RESOURCE_EXHAUSTED, f"{self._max_waiting} requests wait already"
        if failure:
            self._events.append(Failure(*key, *failure))
            return
        num_sequences = 1 if request.beam else request.sampling.n
        sequences = [self._new_sequence(request, i) for i in range(num_sequences)]
        beam = BeamState(request.beam) if request.beam else None
        group = SequenceGroup(request, sequences, beam=beam)
        self._groups[key] = group
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)
        if request.constraint is None:
            self._scheduler.submit(group)
        else:
            self._prepare(group, request.constraint)

    @property
    def _num_waiting(self) -> int:
        return len(self._scheduler.waiting) + len(self._preparing)

    def _prepare(self, group: SequenceGroup, constraint: Constraint) -> None:
        """Have a group's constraint compiled; a `Constrain` command follows."""
        assert self._constraints is not None, "validation refuses it"
        group.state = GroupState.COMPILING
        self._preparing[group] = preparation = Preparation(
            constraint,
            [sequence.token_ids[sequence.num_prompt :] for sequence in group.sequences],
            group.request.end_rule,
            lambda outcome: self.send(Constrain(group, outcome)),
        )
        self._constraints.prepare(preparation)

    def _constrain(self, group: SequenceGroup, outcome: Outcome) -> None:
        """Start a group whose constraint was compiled, unless it has ended meanwhile."""
        if self._preparing.pop(group, None) is None:
            return
        match outcome:
            case ConstraintError():
                self._fail(group, FailureCode.INVALID_ARGUMENT, str(outcome), "constraint")
            case TokensMissingError():
                why = f"the model's engine cannot constrain outputs: {outcome}"
                self._fail(group, FailureCode.FAILED_PRECONDITION, why, "constraint")
            case _:
                for sequence, matcher in zip(group.sequences, outcome, strict=True):
                    sequence.matcher = matcher
                group.record(GroupEvent.CONSTRAINED)
                group.state = GroupState.WAITING
                self._scheduler.submit(group)

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        """Return an output's sequence, with the tokens that another engine sampled for it."""
        tokens, reason = list(request.prompt), None
        if (resumed := request.resume.get(index)) is not None:
            tokens += resumed.token_ids
            reason = FinishReason.ABORTED if resumed.finished else None
        return Sequence(next(self._ids), index, tokens, len(request.prompt), finish_reason=reason)

    def _abort(self, session: int, request_id: str, index: int | None) -> None:
        group = self._groups.get((session, request_id))
        if group is None or (group.beam and index is not None):
            return  # a beam search has no single outputs before it ends
        for sequence in group.live:
            if index is None or sequence.index == index:
                self._scheduler.finish(group, sequence, FinishReason.ABORTED)
        if not group.live:
            self._forget(group, "aborted" if index is None else "finished")

    # Ends.

    def _expire(self) -> None:
        """Fail requests past their deadline."""
        now = time.monotonic()
        if now <= self._next_deadline:
            return
        for group in list(self._groups.values()):
            if group.request.deadline is not None and group.request.deadline < now:
                self._fail(group, FailureCode.DEADLINE_EXCEEDED, "the deadline passed")
        deadlines = (group.request.deadline for group in self._groups.values())
        left = (deadline for deadline in deadlines if deadline is not None)
        self._next_deadline = min(left, default=math.inf)

    def _fail_step(self, error: StepError) -> None:
        """Fail the requests that a failed step may have harmed; end the core if it cannot go on.

        These are all that have K/V, whose contents are unknown now, or that await the output of a
        launched step.

        Raises:
            EngineFailedError: no later step can succeed, or too many in a row have failed.
        """
        batch = error.batch
        log.error(
            "step failed",
            tokens=batch.num_tokens,
            sequences=batch.num_sequences,
            exc_info=error,
        )
        self._pending = None
        scheduler = self._scheduler
        begun = [group for group in scheduler.waiting if group.awaits_output]
        for group in [*scheduler.running, *scheduler.swapped, *begun]:
            self._fail(group, FailureCode.INTERNAL, "the model failed on this batch; try again")
        scheduler.cache.forget_contents()
        self._failed_steps += 1
        if self._executor.device_lost():
            raise EngineFailedError("the device is lost: every later step would fail") from error
        if self._failed_steps >= self._max_failed_steps:
            raise EngineFailedError(f"{self._failed_steps} steps in a row failed") from error

    def _fail(self, group: SequenceGroup, code: FailureCode, message: str, field: str = "") -> None:
        self._scheduler.remove(group)
        request = group.request
        self._events.append(Failure(request.session, request.request_id, code, message, field))
        self._forget(group, code.name.lower())

    def _forget(self, group: SequenceGroup, outcome: str) -> None:
        request = group.request
        del self._groups[request.session, request.request_id]
        if (preparation := self._preparing.pop(group, None)) is not None:
            preparation.cancelled = True
        self._metrics.requests.labels(outcome).inc()
        if self._on_end is not None:
            self._on_end(group, outcome)
        log.info(
            "request ended",
            request_id=request.request_id,
            outcome=outcome,
            output_tokens=sum(sequence.num_output for sequence in group.sequences),
        )


def _scores_to_report(group: SequenceGroup, sequence: Sequence) -> list[TokenLogprob]:
    """Return the prompt's log-probabilities with the first token of the first output, else none."""
    first = group.prompt_logprobs and sequence.num_known_output == 1 and sequence.index == 0
    return group.prompt_logprobs if first else []


def _late_masks(batch: Batch) -> set[int]:
    """Return the ids of the sequences whose masks are not ready."""
    return {
        scheduled.sequence.id
        for scheduled in batch.ruled
        if scheduled.sequence.matcher is not None and not scheduled.sequence.matcher.ready
    }


def _output_event(
    sampled: SampledToken,
    scores: list[TokenLogprob],
    reason: FinishReason | None,
    draft_counts: tuple[int, int],
) -> OutputEvent:
    """Return the event of a token of which there may be more to say."""
    group, sequence, token_id, logprob = sampled
    request = group.request
    return OutputEvent(
        request.session,
        request.request_id,
        sequence.index,
        [token_id],
        logprob,
        scores,
        reason,
        None,
        *draft_counts,
        number=request.first_number + sequence.index if request.first_number else 0,
    )


@contextmanager
def _step_errors(batch: Batch) -> Iterator[None]:
    """Raise whatever the executor raises as a `StepError`."""
    try:
        yield
    except Exception as error:
        raise StepError(batch) from error
