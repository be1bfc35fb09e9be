"""Compute masks beside the core, so that a slow one holds up its own request alone."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

from octavo.common.background import keep_thread_running
from octavo.engine.constraints.matcher import Matcher
from octavo.engine.constraints.priority import lower_priority

QUICK_SECONDS = 0.001
"""A step waits for the masks of matchers whose last ones took less."""
GRACE_SECONDS = 0.005
"""Longest time that a step waits for masks."""
MAX_QUICK_THREADS = 8
SLOW_THREADS = 2

Owner = TypeVar("Owner")


@dataclass(slots=True, eq=False)
class _Job(Generic[Owner]):
    owner: Owner
    matcher: Matcher
    token_ids: Sequence[int]
    awaited: bool  # a step waits for it


@dataclass(frozen=True, slots=True)
class Wait:
    """A step's wait for masks.

    Attributes:
        seconds: How long it took.
        late: Masks that are not ready.
    """

    seconds: float
    late: int


class MaskThreads(Generic[Owner]):
    """Threads that advance matchers.

    Most masks take microseconds, and the next step waits for those. A mask that is late, or whose
    matcher was slow before, is computed while steps go on without its sequence; matchers that
    were slow have threads of their own, of low priority.
    """

    def __init__(self, on_late: Callable[[], None]) -> None:
        """Start no thread yet.

        Args:
            on_late: Called in another thread after each mask for which no step waited.
        """
        self._on_late = on_late
        self._quick: SimpleQueue[_Job[Owner]] = SimpleQueue()
        self._slow: SimpleQueue[_Job[Owner]] = SimpleQueue()
        self._done = threading.Condition()
        self._awaited: set[_Job[Owner]] = set()
        self._failed: list[tuple[Owner, Matcher]] = []
        self._requested = 0  # since the last wait, those of quick matchers among them
        self._quick_requested = 0
        self._started = False

    def request(self, owner: Owner, matcher: Matcher, token_ids: Sequence[int]) -> None:
        """Have a matcher advanced; it is not ready until then.

        Args:
            owner: Whose it is, for `failures`.
            matcher: The matcher, which is ready.
            token_ids: The tokens after those that it has read.
        """
        self._start()
        matcher.ready = False
        job = _Job(owner, matcher, token_ids, awaited=matcher.seconds < QUICK_SECONDS)
        self._requested += 1
        if job.awaited:
            self._quick_requested += 1
            with self._done:
                self._awaited.add(job)
            self._quick.put(job)
        else:
            self._slow.put(job)

    def wait(self) -> Wait | None:
        """Wait for the quick masks that were requested since the last call, and not for long.

        Returns:
            How it went; None if no mask was requested.
        """
        if not self._requested:
            return None
        slow, self._requested = self._requested - self._quick_requested, 0
        self._quick_requested = 0
        began = time.perf_counter()
        with self._done:
            self._done.wait_for(lambda: not self._awaited, GRACE_SECONDS)
            late = slow + len(self._awaited)
            for job in self._awaited:
                job.awaited = False
            self._awaited.clear()
        return Wait(time.perf_counter() - began, late)

    def failures(self) -> list[tuple[Owner, Matcher]]:
        """Return the matchers that have failed since the last call, with their owners."""
        if not self._failed:
            return []
        with self._done:
            failed, self._failed = self._failed, []
        return failed

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        for i in range(min(MAX_QUICK_THREADS, len(os.sched_getaffinity(0)))):
            keep_thread_running(partial(self._work, self._quick), f"masks-{i}")
        for i in range(SLOW_THREADS):
            keep_thread_running(self._work_slowly, f"slow-masks-{i}")

    def _work_slowly(self) -> None:
        lower_priority()
        self._work(self._slow)

    def _work(self, jobs: "SimpleQueue[_Job[Owner]]") -> None:
        while True:
            job = jobs.get()
            job.matcher.advance(job.token_ids)
            with self._done:
                if job.matcher.error is not None:
                    self._failed.append((job.owner, job.matcher))
                awaited = job.awaited
                self._awaited.discard(job)
                if awaited and not self._awaited:
                    self._done.notify()
            if not awaited:
                self._on_late()
            del job  # or it would keep the request until the next one
