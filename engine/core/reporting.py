"""Reporting of steps: events for the sessions, metrics, and the load."""

import time
from collections.abc import Callable

from octavo.engine.constraints.compiler import ConstraintCompiler
from octavo.engine.core.requests import Requests
from octavo.engine.events import Event, Load, PrefixChange, Started, measure_load
from octavo.engine.kv_disk.disk_tier import DiskTier
from octavo.engine.metrics import EngineMetrics
from octavo.engine.output_events import output_events
from octavo.engine.running.executor import Executor
from octavo.engine.scheduling.batch import Batch, StepOutput
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.scheduling.sequence import GroupEvent, GroupState

Publish = Callable[[list[Event], Load], None]
PublishPrefixes = Callable[[PrefixChange], None]


class Reporter:
    """Publishes the events of steps with the load.

    Attributes:
        load: The last published load; read from any thread.
        reported: Time of its publication, in `time.monotonic()` seconds; read from any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Requests,
        metrics: EngineMetrics,
        publish: Publish,
        publish_prefixes: PublishPrefixes,
        *,
        constraints: ConstraintCompiler | None,
        disk: DiskTier | None,
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._metrics = metrics
        self._publish_events = publish
        self._publish_prefixes = publish_prefixes
        self._constraints = constraints
        self._disk = disk
        self._step_ended = 0.0
        self._step_seconds = 0.0
        self.reported = time.monotonic()
        self.load = self._measured()
        metrics.show(lambda: self.load)

    def publish(self) -> None:
        """Publish all events since the last call, the load, and the changes of the prefix cache."""
        self.reported = time.monotonic()
        self.load = self._measured()
        self._metrics.observe_counters(self._scheduler)
        if self._constraints is not None:
            self._metrics.observe_constraints(self._constraints.counters)
        if self._disk is not None:
            self._metrics.observe_disk(self._disk.counters)
        cache = self._scheduler.cache
        stored, evicted = cache.take_changes()
        if stored or evicted:
            self._publish_prefixes(PrefixChange(None, stored, evicted, cache.contents(stored)))
        events, self._requests.events = self._requests.events, []
        self._publish_events(events, self.load)

    def publish_cache(self, session: int) -> None:
        """Publish the prefix cache's keys to a new session."""
        cache = self._scheduler.cache
        stored = frozenset(cache.published)
        self._publish_prefixes(PrefixChange(session, stored, (), cache.contents(stored)))

    def _measured(self) -> Load:
        waiting, draining = self._requests.num_waiting, self._requests.draining
        return measure_load(self._scheduler, waiting, self._step_seconds, draining=draining)

    def report_starts(self, batch: Batch) -> None:
        """Create a `Started` event for each request that is computed for the first time."""
        for group in dict.fromkeys(g for g in batch.groups if not g.start_reported):
            request, group.start_reported = group.request, True
            group.record(GroupEvent.PREFILL)
            self._metrics.observe_start(request, group.cached_tokens)
            started = Started(request.session, request.request_id, group.cached_tokens)
            self._requests.events.append(started)

    def report_outputs(self, output: StepOutput) -> None:
        """Create the events of new tokens, and forget finished groups."""
        self._requests.events += output_events(output)
        ended = [output.samples.groups[i] for i in output.ends]
        finished = [group for group in ended if group.state is GroupState.FINISHED]
        for group in dict.fromkeys([*finished, *output.searches]):
            self._requests.forget(group, "finished")
        self._metrics.output_tokens.inc(len(output.token_ids) + len(output.continuations))

    def measure(self, batch: Batch, executor: Executor) -> None:
        """Update the metrics, and the rates that the preemption policy compares."""
        now = time.perf_counter()
        self._step_seconds = now - max(batch.created, self._step_ended)
        self._step_ended = now
        self._scheduler.observe_step(batch, self._step_seconds, executor.take_copy_times())
        compiled, eager_steps = executor.compiled, executor.eager_steps
        self._metrics.observe_step(
            batch, self._step_seconds, compiled=compiled, eager_steps=eager_steps
        )
