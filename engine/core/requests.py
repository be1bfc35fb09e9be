"""The core's requests: submit, report, abort, fail, and forget them at their end."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count

from octavo.engine.constraints.compiler import (
    ConstraintCompiler,
    Outcome,
    Preparation,
    TokensMissingError,
)
from octavo.engine.constraints.constraint import Constraint, ConstraintError
from octavo.engine.events import FailureCode, StepOutput
from octavo.engine.kv_disk.read_ahead import ReadAhead
from octavo.engine.metrics import EngineMetrics
from octavo.engine.output_events import add_outputs
from octavo.engine.scheduling.batch import Batch, Samples
from octavo.engine.scheduling.request import FinishReason, Request
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.scheduling.sequence import GroupEvent, GroupState, SequenceGroup, new_group
from octavo.v1.engine_pb2 import Failure, Started

OnEnd = Callable[[SequenceGroup, str], None]


class Requests:
    """The requests that have not ended, each with its sequence group.

    Attributes:
        groups: Group of each request, by session and request id.
        preparing: Groups whose constraint is being compiled.
        draining: Whether new requests are refused.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        call: Callable[..., None],
        *,
        max_waiting: int,
        on_end: OnEnd,
        constraints: ConstraintCompiler | None,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._call = call  # has the core's thread call a function; from any thread
        self._max_waiting = max_waiting
        self._on_end = on_end
        self._constraints = constraints
        self._read_ahead = read_ahead
        self._queue = (scheduler if read_ahead is None else read_ahead).submit
        self.groups: dict[tuple[int, str], SequenceGroup] = {}
        self.preparing: dict[SequenceGroup, Preparation] = {}
        self._events: defaultdict[int, StepOutput] = defaultdict(StepOutput)
        self._next_deadline = math.inf  # no request has an earlier one
        self._ids = count()
        self.draining = False

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for admission, for a constraint or for blocks to read."""
        reading = 0 if self._read_ahead is None else len(self._read_ahead.reads)
        return len(self._scheduler.waiting) + len(self.preparing) + reading

    def submit(self, request: Request) -> None:
        """Queue a request; or refuse it with an event."""
        key = request.session, request.request_id
        failure = None
        if self.draining:
            failure = FailureCode.UNAVAILABLE, "the engine is draining; try another"
        elif key in self.groups:
            failure = FailureCode.ALREADY_EXISTS, f"request_id {request.request_id!r} is running"
        elif self.num_waiting >= self._max_waiting:
            failure = FailureCode.RESOURCE_EXHAUSTED, f"{self._max_waiting} requests wait already"
        if failure:
            self._add_failure(request, *failure)
            return
        self.groups[key] = group = new_group(request, self._ids)
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)
        if request.constraint is None:
            self._queue(group)
        else:
            self._prepare(group, request.constraint)

    def _prepare(self, group: SequenceGroup, constraint: Constraint) -> None:
        """Start compiling a group's constraint; a call of `_constrain` follows."""
        assert self._constraints is not None, "validation refuses it"
        group.state = GroupState.COMPILING
        self.preparing[group] = preparation = Preparation(
            constraint,
            [sequence.token_ids[sequence.num_prompt :] for sequence in group.sequences],
            group.request.end_rule,
            partial(self._call, self._constrain, group),
        )
        self._constraints.prepare(preparation)

    def _constrain(self, group: SequenceGroup, outcome: Outcome) -> None:
        """Queue a group whose constraint was compiled, unless it has ended meanwhile."""
        if self.preparing.pop(group, None) is None:
            return
        match outcome:
            case ConstraintError():
                self.fail_constraint(group, str(outcome))
            case TokensMissingError():
                why = f"the model's engine cannot constrain outputs: {outcome}"
                self.fail(group, FailureCode.FAILED_PRECONDITION, why, "constraint")
            case _:
                for sequence, matcher in zip(group.sequences, outcome, strict=True):
                    sequence.matcher = matcher
                group.record(GroupEvent.CONSTRAINED)
                group.state = GroupState.WAITING
                self._queue(group)

    def abort(self, session: int, request_id: str, index: int | None) -> None:
        """Stop a request, or one of its outputs."""
        group = self.groups.get((session, request_id))
        if group is None or (group.beam and index is not None):
            return  # a beam search has no separate outputs before it ends
        for sequence in group.live:
            if index is None or sequence.index == index:
                self._scheduler.finish(group, sequence, FinishReason.ABORTED)
        if not group.live:
            self.forget(group, "aborted" if index is None else "finished")

    def abort_session(self, session: int) -> None:
        """Stop all requests of a session."""
        for owner, request_id in list(self.groups):
            if owner == session:
                self.abort(session, request_id, None)

    def expire(self) -> None:
        """Fail requests past their deadline."""
        if (now := time.monotonic()) <= self._next_deadline:
            return
        for group in list(self.groups.values()):
            if group.request.deadline is not None and group.request.deadline < now:
                self.fail(group, FailureCode.DEADLINE_EXCEEDED, "the deadline passed")
        left = [group.request.deadline for group in self.groups.values()]
        self._next_deadline = min((d for d in left if d is not None), default=math.inf)

    def take_events(self) -> Mapping[int, StepOutput]:
        """Return the events of each session since the last call."""
        events, self._events = self._events, defaultdict(StepOutput)
        return events

    def report_starts(self, batch: Batch) -> None:
        """Report each request that is computed for the first time."""
        for group in dict.fromkeys(g for g in batch.groups if not g.start_reported):
            request, group.start_reported = group.request, True
            group.record(GroupEvent.PREFILL)
            self._metrics.observe_start(request, group.cached_tokens)
            started = Started(request_id=request.request_id, cached_tokens=group.cached_tokens)
            self._events[request.session].started.append(started)

    def report_outputs(self, samples: Samples) -> None:
        """Create the events of new tokens, and forget finished groups."""
        add_outputs(self._events, samples)
        for group in dict.fromkeys([*(samples.groups[i] for i in samples.ends), *samples.searches]):
            if group.state is GroupState.FINISHED:
                self.forget(group, "finished")
        self._metrics.output_tokens.inc(len(samples) + len(samples.continuations))

    def fail(self, group: SequenceGroup, code: FailureCode, message: str, field: str = "") -> None:
        """End a request with an error."""
        self._scheduler.remove(group)
        self._add_failure(group.request, code, message, field)
        self.forget(group, code.name.lower())

    def _add_failure(
        self, request: Request, code: FailureCode, message: str, field: str = ""
    ) -> None:
        failure = Failure(request_id=request.request_id, code=code, message=message, field=field)
        self._events[request.session].failures.append(failure)

    def fail_constraint(self, group: SequenceGroup, message: str) -> None:
        """End a request whose constraint cannot be satisfied."""
        self.fail(group, FailureCode.INVALID_ARGUMENT, message, "constraint")

    def close(self) -> None:
        """End all requests, as the engine stops, and the threads that prepare them."""
        for part in (self._constraints, self._read_ahead):
            if part is not None:
                part.close()
        self.fail_all()

    def fail_all(self) -> None:
        """End all requests with UNAVAILABLE: they can migrate."""
        for group in list(self.groups.values()):
            self.fail(group, FailureCode.UNAVAILABLE, "the engine stopped; try again")

    def forget(self, group: SequenceGroup, outcome: str) -> None:
        """Forget a request that has ended, and count its outcome."""
        request = group.request
        del self.groups[request.session, request.request_id]
        if (preparation := self.preparing.pop(group, None)) is not None:
            preparation.cancelled = True
        if self._read_ahead is not None:
            self._read_ahead.cancel(group)
        self._metrics.requests.labels(outcome).inc()
        self._on_end(group, outcome)
