"""Computes masks beside the core, so that a slow mask delays only its own request."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from octavo.common.background import keep_thread_running
from octavo.common.thread_priority import lower_priority, run_when_idle
from octavo.engine.constraints.matcher import Matcher
from octavo.engine.speculation.method import NO_GUESS, Guess

GRACE_SECONDS = 0.005
"""Maximum time that a step waits for masks."""
MAX_MASK_SECONDS = 2.0
"""Maximum processor seconds of a mask; a trial allows a twentieth."""
SLOWEST_SECONDS = 0.01
"""Seconds above which masks are computed at the lowest priority."""
TAKES_LONG_SECONDS = 0.002
"""Processor seconds after which a late mask continues at the lowest priority."""
MAX_QUICK_THREADS = 8
MAX_STANDINS = 8
"""Maximum number of replacements for threads with a slow mask."""

Owner = TypeVar("Owner")


@dataclass(slots=True, eq=False)
class _Job(Generic[Owner]):
    """A matcher to advance.

    Attributes:
        owner: See `request`.
        matcher: See `request`.
        token_ids: See `request`.
        guess: See `request`.
        awaited: Whether a step waits for it.
        thread: Ident and native id of its thread, once it has begun.
        standin: The job of the thread that replaces this one's.
        began: The thread's processor time at its beginning.
        abandoned: Whether it took too long and was reported to its owner.
        replaced: Whether another thread replaces its thread.
    """

    owner: Owner
    matcher: Matcher
    token_ids: Sequence[int]
    guess: Guess
    awaited: bool
    thread: tuple[int, int] | None = None
    standin: Callable[[], None] = lambda: None
    began: float = 0.0
    abandoned: bool = False
    replaced: bool = False

    @property
    def seconds(self) -> float:
        """Its processor time so far."""
        if self.thread is None:
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread[0])) - self.began


class MaskThreads(Generic[Owner]):
    """Threads that advance matchers.

    Most masks take microseconds, and a step waits for them after its model has run. If a mask is
    late, or its matcher was slow before, steps continue without its sequence. Slow matchers have
    their own threads: one of low priority, and one of the lowest priority for the slowest.
    """

    def __init__(self, on_late: Callable[[], None]) -> None:
        """Set up without starting a thread.

        Args:
            on_late: Called in another thread after each mask that no step waited for.
        """
        self._on_late = on_late
        self._quick: SimpleQueue[_Job[Owner]] = SimpleQueue()
        self._slow: SimpleQueue[_Job[Owner]] = SimpleQueue()
        self._slowest: SimpleQueue[_Job[Owner]] = SimpleQueue()
        self._done = threading.Condition()
        self._awaited: set[_Job[Owner]] = set()
        self._running: set[_Job[Owner]] = set()
        self._failed: list[tuple[Owner, str]] = []
        self._requested = 0  # both since the last wait
        self._quick_requested = 0
        self._standins = 0
        self._started = False

    @property
    def requested(self) -> bool:
        """Whether a mask was requested since the last wait."""
        return self._requested > 0

    def request(
        self, owner: Owner, matcher: Matcher, token_ids: Sequence[int], guess: Guess = NO_GUESS
    ) -> None:
        """Advance a matcher in a thread; it is not ready until that ends.

        Args:
            owner: The owner of the output, for `failures`.
            matcher: The matcher, which is ready.
            token_ids: The tokens after those that it has read.
            guess: The tokens to draft after them.
        """
        self._start()
        matcher.ready = False
        matcher.awaited = matcher.quick
        job = _Job(owner, matcher, token_ids, guess, awaited=matcher.quick)
        self._requested += 1
        if job.awaited:
            self._quick_requested += 1
            with self._done:
                self._awaited.add(job)
            self._quick.put(job)
        else:
            (self._slow if matcher.seconds < SLOWEST_SECONDS else self._slowest).put(job)

    def wait(self) -> tuple[float, int] | None:
        """Wait a short time for the quick masks requested since the last call.

        Returns:
            The seconds, and the number of masks that are not ready; None if none was requested.
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
                job.awaited = job.matcher.awaited = False
            self._awaited.clear()
            if late > slow:
                self._demote_late()
        return time.perf_counter() - began, late

    def failures(self) -> list[tuple[Owner, str]]:
        """Return the owners of outputs found to be unable to continue, with the constraint's fault.

        Each is returned once.
        """
        if not self._running and not self._failed:
            return []
        with self._done:
            self._abandon_slow()
            failed, self._failed = self._failed, []
        return failed

    def _abandon_slow(self) -> None:
        """Give up masks that take too long, and replace the threads that compute them."""
        for job in self._running:
            if job.abandoned or job.awaited or job.seconds < MAX_MASK_SECONDS:
                continue
            job.abandoned = True
            why = f"a mask takes more than {MAX_MASK_SECONDS:g} s to compute; make it simpler"
            self._failed.append((job.owner, why))
            self._replace(job)

    def _demote_late(self) -> None:
        """Continue slow late masks at the lowest priority."""
        for job in self._running:
            if not job.awaited and not job.replaced and job.seconds > TAKES_LONG_SECONDS:
                self._replace(job)

    def _replace(self, job: "_Job[Owner]") -> None:
        """Start another thread in place of a job's thread, which ends with the job."""
        if job.thread is None or job.replaced or self._standins == MAX_STANDINS:
            return
        self._standins += 1
        job.replaced = True
        run_when_idle(job.thread[1])
        keep_thread_running(job.standin, "masks-instead")

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        for i in range(min(MAX_QUICK_THREADS, len(os.sched_getaffinity(0)))):
            keep_thread_running(self._work_quickly, f"masks-{i}")
        keep_thread_running(self._work_slowly, "slow-masks")
        keep_thread_running(self._work_when_idle, "slowest-masks")

    def _work_quickly(self) -> None:
        self._work(self._quick, self._work_quickly)

    def _work_slowly(self) -> None:
        lower_priority()
        self._work(self._slow, self._work_slowly)

    def _work_when_idle(self) -> None:
        run_when_idle()
        self._work(self._slowest, self._work_when_idle)

    def _work(self, jobs: "SimpleQueue[_Job[Owner]]", standin: Callable[[], None]) -> None:
        while True:
            job = jobs.get()
            job.began, job.standin = time.thread_time(), standin
            job.thread = threading.get_ident(), threading.get_native_id()
            with self._done:
                self._running.add(job)
            job.matcher.advance(job.token_ids, job.guess)
            with self._done:
                self._running.discard(job)
                awaited = self._finish(job)
            if not awaited:
                self._on_late()
            if job.replaced:
                return
            del job  # otherwise it would keep the request alive

    def _finish(self, job: "_Job[Owner]") -> bool:
        """Record a job's outcome; return whether a step waits for it."""
        self._standins -= job.replaced
        if job.abandoned:
            return False
        matcher = job.matcher
        if matcher.error is not None:
            after = f"after {matcher.length} tokens of the output: {matcher.error}"
            self._failed.append((job.owner, after))
        awaited, matcher.awaited = job.awaited, False
        self._awaited.discard(job)
        if awaited and not self._awaited:
            self._done.notify()
        return awaited
