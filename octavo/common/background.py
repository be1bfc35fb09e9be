"""Background tasks and threads: none of them ends without a word.

This module is the only one that makes tasks and threads. What runs beside its maker either

- is restarted when it fails (`keep_running`, `keep_thread_running`),
- belongs to a block of code that waits for its end and gets its error (`joined`), or
- is a job that may fail, and then logs so (`report_failure`, `start_thread`).
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

import structlog

log = structlog.get_logger(__name__)

FIRST_DELAY = 0.05
"""Seconds before the first restart; doubled with each failure after it."""
LONGEST_DELAY = 10.0
LOOK_SECONDS = 1.0
"""How often a call that waits for a thread looks whether the threads live."""
STEADY_SECONDS = 60.0
"""What has run for so long starts over with `FIRST_DELAY`."""

_Result = TypeVar("_Result")


class BackgroundError(Exception):
    """What a process cannot do without has ended; the message names it."""


def keep_running(main: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
    """Run `main` as a task; when it fails, log the error and run it again.

    It ends when `main` returns, or when it is cancelled.

    Args:
        main: Called anew for each run.
        name: The task's, also in the log.
    """
    return asyncio.create_task(_restarting(main, name), name=name)


async def _restarting(main: Callable[[], Awaitable[None]], name: str) -> None:
    delays = _Delays()
    while True:
        try:
            await main()
        except (Exception, asyncio.CancelledError) as error:
            if _cancelled(error):
                raise
            delay = delays.next()
            log.exception("background_task_failed", task=name, restart_seconds=delay)
            await asyncio.sleep(delay)
        else:
            return


def _cancelled(error: BaseException) -> bool:
    """Tell the cancellation of the running task from that of something it waited for."""
    task = asyncio.current_task()
    assert task is not None
    return isinstance(error, asyncio.CancelledError) and task.cancelling() > 0


def report_failure(main: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
    """Run `main` as a task; when it fails, log the error.

    For jobs that the process can do without.
    """
    return asyncio.create_task(_reporting(main, name), name=name)


async def _reporting(main: Callable[[], Awaitable[None]], name: str) -> None:
    try:
        await main()
    except (Exception, asyncio.CancelledError) as error:
        if _cancelled(error):
            raise
        log.exception("background_task_failed", task=name)


@asynccontextmanager
async def joined(
    *works: Coroutine[Any, Any, _Result],
    names: tuple[str, ...] = (),
    expected: tuple[type[Exception], ...] = (),
) -> AsyncIterator[tuple[asyncio.Task[_Result], ...]]:
    """Run `works` as tasks within a block; cancel those that are left at its end, and wait.

    The block looks at the tasks' results. An error of a task that the block did not raise itself
    is logged.

    Args:
        works: What to run.
        names: The tasks', as far as they have any.
        expected: Errors that are not logged.

    Yields:
        The tasks, in the order of `works`.
    """
    tasks = tuple(map(asyncio.create_task, works))
    for task, name in zip(tasks, names, strict=False):
        task.set_name(name)
    raised: BaseException | None = None
    try:
        yield tasks
    except BaseException as error:
        raised = error
        raise
    finally:
        await end(*tasks)
        for task in tasks:
            failure = None if task.cancelled() else task.exception()
            if failure is None or failure is raised or isinstance(failure, expected):
                continue
            log.error("background_task_failed", task=task.get_name(), exc_info=failure)


async def first_to_end(**works: Coroutine[Any, Any, object]) -> NoReturn:
    """Wait for the first end of what a process cannot do without.

    Args:
        works: By the name for the message, what ends when that has ended.

    Raises:
        BackgroundError: One has ended; caused by its error, if it had one.
    """
    async with joined(*works.values(), names=tuple(works), expected=(Exception,)) as tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = done.pop()
        error = None if ended.cancelled() else ended.exception()
        raise BackgroundError(f"{ended.get_name()} stopped unexpectedly") from error


async def shielded(future: Awaitable[_Result]) -> _Result:
    """Return the future's result; whoever cancels this does not cancel the future."""
    return await asyncio.shield(future)


def start(work: Coroutine[Any, Any, _Result], name: str) -> asyncio.Task[_Result]:
    """Run `work` as a task that the caller waits for, all the time that it runs."""
    return asyncio.create_task(work, name=name)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def keep_thread_running(main: Callable[[], None], name: str) -> threading.Thread:
    """Run `main` in a daemon thread; when it fails, log the error and run it again."""

    def restarting() -> None:
        delays = _Delays()
        while True:
            try:
                main()
            except BaseException:
                delay = delays.next()
                log.exception("background_thread_failed", thread=name, restart_seconds=delay)
                time.sleep(delay)
            else:
                return

    return _start(restarting, name)


def start_thread(main: Callable[[], None], name: str) -> threading.Thread:
    """Run `main` in a daemon thread; when it fails, log the error.

    For jobs that the process can do without.
    """

    def reporting() -> None:
        try:
            main()
        except BaseException:
            log.exception("background_thread_failed", thread=name)

    return _start(reporting, name)


def _start(main: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=main, name=name, daemon=True)
    thread.start()
    return thread


class OneThread:
    """A daemon thread that calls are made in, one after another.

    A process that is told to stop does not wait for it, unlike for asyncio's own threads.

    Args:
        name: The thread's.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = keep_thread_running(self._run, name)

    def call(self, function: Callable[..., _Result], *arguments: object) -> asyncio.Future[_Result]:
        """Return what `function` is going to return."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Result] = loop.create_future()

        def tell(set_outcome: Callable[[Any], None], outcome: object) -> None:
            if not done.done():
                set_outcome(outcome)

        def call() -> None:
            try:
                outcome: tuple[Callable[[Any], None], object]
                outcome = done.set_result, function(*arguments)
            except BaseException as error:  # noqa: BLE001 - raised to the caller
                outcome = done.set_exception, error
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(tell, *outcome)

        self._calls.put(call)
        return done

    def close(self) -> None:
        """End the thread after the calls that were made."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


async def call_in_thread(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Return what `function` returns, called in a daemon thread of its own."""
    thread = OneThread(getattr(function, "__name__", "call"))
    done = thread.call(function, *arguments)
    thread.close()
    return await done


class Workers:
    """Threads that calls are made in; one that has died is replaced.

    Args:
        count: Most threads.
        name: The beginning of their names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._threads: list[threading.Thread] = []
        self._pool = self._new_pool()

    async def run(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Return what `function` returns, called in one of the threads.

        Raises:
            BackgroundError: A thread died before it was called.
        """
        self._replace_dead()
        pool = self._pool
        call = pool.submit(function, *arguments)
        done = asyncio.wrap_future(call)
        try:
            while not done.done():
                await asyncio.wait({done}, timeout=LOOK_SECONDS)
                self._replace_dead()
                if pool is not self._pool and call.cancel():  # no thread had begun it
                    raise BackgroundError(f"a thread of {self._name!r} died; try again")
            return done.result()
        finally:
            done.cancel()

    def close(self) -> None:
        """End the threads; what they still do is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _replace_dead(self) -> None:
        """Take new threads where one has died; those that live end with what they do."""
        if not all(thread.is_alive() for thread in self._threads):
            log.error("background_thread_failed", thread=self._name)
            self._pool.shutdown(wait=False)
            self._threads = []
            self._pool = self._new_pool()

    def _new_pool(self) -> ThreadPoolExecutor:
        threads = self._threads
        return ThreadPoolExecutor(
            self._count,
            thread_name_prefix=self._name,
            initializer=lambda: threads.append(threading.current_thread()),
        )


class _Delays:
    """Seconds before each restart."""

    def __init__(self) -> None:
        self._delay = FIRST_DELAY
        self._last = time.monotonic()

    def next(self) -> float:
        """Return the seconds to wait before the next run."""
        now = time.monotonic()
        ran, self._last = now - self._last, now
        if ran > STEADY_SECONDS:
            self._delay = FIRST_DELAY
        delay, self._delay = self._delay, min(2 * self._delay, LONGEST_DELAY)
        return delay
