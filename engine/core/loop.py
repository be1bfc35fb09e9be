"""The core loop: handle other threads' calls, then compute one step, repeatedly."""

import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from octavo.engine.constraints.compiler import ConstraintCompiler
from octavo.engine.core.masks import Masks
from octavo.engine.core.requests import OnEnd, Requests
from octavo.engine.core.step import Steps
from octavo.engine.events import PrefixReport, Publish, measure_load
from octavo.engine.execution.executor import Executor
from octavo.engine.execution.failures import StepError
from octavo.engine.kv_disk.disk_tier import DiskTier
from octavo.engine.kv_disk.read_ahead import Peers, ReadAhead
from octavo.engine.metrics import EngineMetrics
from octavo.engine.scheduling.batch import Samples
from octavo.engine.scheduling.request import Request
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.v1.engine_pb2 import Load

HEARTBEAT_SECONDS = 1.0
"""Seconds between an idle core's reports of its load; a longer silence means that it hangs."""


class EngineCore:
    """The loop, in its own thread, which owns the scheduler, the cache and the executor.

    Other threads call `submit`, `abort`, `open_session`, `close_session`, `drain`, `fail_all` and
    `stop`; or anything else by `call`. Such a call is queued, and runs between steps in the core's
    thread; events publish its results. So the engine's state needs no lock.

    Attributes:
        read_ahead: Reads blocks from disk and other engines; None if there are neither.
        load: The last published load; read from any thread.
        reported: Time of its publication, in `time.monotonic()` seconds; read from any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        metrics: EngineMetrics,
        publish: Publish,
        *,
        max_waiting: int,
        max_failed_steps: int = 3,
        async_scheduling: bool = False,
        on_end: OnEnd = lambda _group, _outcome: None,
        constraints: ConstraintCompiler | None = None,
        disk: DiskTier | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Set up the core; `run` starts its loop.

        Args:
            scheduler: The scheduler, which owns the cache.
            executor: Runs the model.
            metrics: The engine's metrics.
            publish: Called with new events and the load.
            max_waiting: Maximum number of requests that wait for admission.
            max_failed_steps: Number of consecutive failed steps after which the core ends.
            async_scheduling: Whether to launch each step before collecting the previous one.
            on_end: Called with each ended group and the way it ended.
            constraints: Compiler of requests' constraints; None if constraints are not accepted.
            disk: Keeps prefix blocks on disk; None keeps them in memory alone.
            peers: Reads prefix blocks of other engines; None reads none.
        """
        self._scheduler = scheduler
        self._executor = executor
        self._constraints = constraints
        self._metrics = metrics
        self._publish_events = publish
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopped = False
        self.read_ahead: ReadAhead | None = None
        if disk is not None or peers is not None:
            self.read_ahead = ReadAhead(
                scheduler, executor.cache, self.call, tier=disk, peers=peers
            )
        self._prefix_report = PrefixReport(scheduler.cache.prefixes, disk)
        self.requests = Requests(
            scheduler,
            metrics,
            self.call,
            max_waiting=max_waiting,
            on_end=on_end,
            constraints=constraints,
            read_ahead=self.read_ahead,
        )
        self.steps = Steps(
            scheduler,
            executor,
            Masks(scheduler, metrics, self.requests.fail_constraint, self.call),
            self.requests,
            metrics=metrics,
            publish=self._publish,
            async_scheduling=async_scheduling,
            max_failed=max_failed_steps,
        )
        self.reported = time.monotonic()
        self.load = self._measured()
        metrics.show(lambda: self.load)

    def call(self, function: Callable[..., None] = lambda: None, *arguments: object) -> None:
        """Have the core's thread call a function between steps."""
        self._calls.put(partial(function, *arguments))

    def submit(self, request: Request) -> None:
        """Queue a request; its events follow."""
        self.call(self.requests.submit, request)

    def abort(self, session: int, request_id: str, index: int | None = None) -> None:
        """Stop a request, or one of its outputs; no more events of it follow."""
        self.call(self.requests.abort, session, request_id, index)

    def open_session(self, session: int) -> None:
        """Publish the prefix cache's keys to a new session."""
        self.call(self._prefix_report.open_session, session)

    def close_session(self, session: int) -> None:
        """Stop all requests of a session."""
        self.call(self.requests.abort_session, session)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.call(setattr, self.requests, "draining", True)

    def fail_all(self) -> None:
        """Fail remaining requests with UNAVAILABLE; other engines can still copy their blocks."""
        self.call(self.requests.fail_all)

    def stop(self) -> None:
        """End before the next step; remaining requests fail with UNAVAILABLE."""
        self.call(setattr, self, "_stopped", True)

    @property
    def idle(self) -> bool:
        """Whether no request is left; a request just submitted may not count yet."""
        return not self.requests.groups

    @property
    def working(self) -> bool:
        """Whether `step` has work."""
        steps = self.steps
        return bool(steps.pending or steps.in_flight) or not self._scheduler.idle

    def run(self) -> None:
        """Serve until `stop`.

        At the end, for any reason, remaining requests fail with UNAVAILABLE.

        Raises:
            EngineFailedError: The device is lost, or too many consecutive steps failed.
        """
        self.reported = time.monotonic()
        try:
            while not self._stopped:
                self._take_calls()
                self.requests.expire()
                if self.working and not self._stopped:
                    try:
                        self.step()
                    except StepError as error:
                        self.steps.fail(error)
                if self._scheduler.idle or self.steps.stalled:
                    self._publish()  # or the next step, while the model runs
        finally:
            self._executor.close()
            self.requests.close()
            self._publish()

    def step(self) -> Samples | None:
        """Compute one step; see `Steps.step`."""
        output = self.steps.step()
        if self.read_ahead is not None:
            self.read_ahead.save()
        return output

    def _take_calls(self) -> None:
        """Run all queued calls; wait a while for one if there is no other work."""
        # While a constraint is compiled, a call may come at any moment.
        unused = not self.working and (bool(self.requests.preparing) or not self._use_idle_time())
        try:
            call = self._calls.get(self.steps.stalled or unused, HEARTBEAT_SECONDS)
            while True:
                call()
                call = self._calls.get_nowait()
        except Empty:
            pass

    def _use_idle_time(self) -> bool:
        """Do work that would slow steps down, until a call comes; return whether work is left."""
        until = time.monotonic() + HEARTBEAT_SECONDS / 2
        while self._calls.empty() and time.monotonic() < until:
            if not self._executor.cache.populate():
                return False
        return True

    def _publish(self) -> None:
        """Publish all events since the last call, the load, and the changes of the prefix cache."""
        self.reported = time.monotonic()
        self.load = self._measured()
        scheduler = self._scheduler
        for part in (scheduler, scheduler.cache.moves, self._constraints, self.read_ahead):
            if part is not None:
                self._metrics.observe_counters(part.counters)
        self._publish_events(self.requests.take_events(), self._prefix_report.take(), self.load)

    def _measured(self) -> Load:
        waiting, draining = self.requests.num_waiting, self.requests.draining
        return measure_load(
            self._scheduler, waiting, self.steps.seconds, self.read_ahead, draining=draining
        )
