"""Background tasks and threads, made only in this module so that each failure is visible.

`keep_running` and `keep_thread_running` restart failed ones, `joined` raises the error in a waiting
block of code, and `report_failure` and `start_thread` log it.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

import structlog

log = structlog.get_logger(__name__)

FIRST_DELAY = 0.05
"""Seconds before the first restart; doubled after each further failure."""
LONGEST_DELAY = 10.0
LOOK_SECONDS = 1.0
"""Seconds between checks that threads are alive, while a call waits for one."""
STEADY_SECONDS = 60.0
"""Seconds of running after which the delay is `FIRST_DELAY` again."""

_Result = TypeVar("_Result")


class BackgroundError(Exception):
    """An essential task or thread has ended; the message has its name."""


def keep_running(main: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
    """Run `main` as a task until it returns or is cancelled; log errors and restart it."""

    async def restarting() -> None:
        delays = restart_delays()
        while True:
            try:
                await main()
            except (Exception, asyncio.CancelledError) as error:
                if _cancelled(error):
                    raise
                delay = next(delays)
                log.exception("background task failed", task=name, restart_seconds=delay)
                await asyncio.sleep(delay)
            else:
                return

    return asyncio.create_task(restarting(), name=name)


def _cancelled(error: BaseException) -> bool:
    """Return whether the current task was cancelled, not something that it waited for."""
    task = asyncio.current_task()
    assert task is not None
    return isinstance(error, asyncio.CancelledError) and task.cancelling() > 0


def report_failure(main: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
    """Run `main` as a task, for an optional job; log its error."""

    async def reporting() -> None:
        try:
            await main()
        except (Exception, asyncio.CancelledError) as error:
            if _cancelled(error):
                raise
            log.exception("background task failed", task=name)

    return asyncio.create_task(reporting(), name=name)


@asynccontextmanager
async def joined(
    *works: Coroutine[Any, Any, _Result],
    names: tuple[str, ...] = (),
    expected: tuple[type[Exception], ...] = (),
) -> AsyncIterator[tuple[asyncio.Task[_Result], ...]]:
    """Run `works` as tasks within a block; yield the tasks, and cancel the rest at its end.

    Task errors that the block did not raise itself are logged, except `expected` ones.
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
            log.error("background task failed", task=task.get_name(), exc_info=failure)


async def first_to_end(**works: Coroutine[Any, Any, object]) -> NoReturn:
    """Run essential `works`, by name, until the first one ends.

    Raises:
        BackgroundError: A work has ended; its error, if any, is the cause.
    """
    async with joined(*works.values(), names=tuple(works), expected=(Exception,)) as tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = done.pop()
        error = None if ended.cancelled() else ended.exception()
        raise BackgroundError(f"{ended.get_name()} stopped unexpectedly") from error


async def shielded(future: Awaitable[_Result]) -> _Result:
    """Return the future's result; cancelling this call does not cancel the future."""
    return await asyncio.shield(future)


def start(work: Coroutine[Any, Any, _Result], name: str) -> asyncio.Task[_Result]:
    """Run `work` as a task that the caller waits for."""
    return asyncio.create_task(work, name=name)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def keep_thread_running(main: Callable[[], None], name: str) -> threading.Thread:
    """Run `main` in a daemon thread; when it fails, log the error and run it again."""

    def restarting() -> None:
        delays = restart_delays()
        while True:
            try:
                main()
            except BaseException:
                delay = next(delays)
                log.exception("background thread failed", thread=name, restart_seconds=delay)
                time.sleep(delay)
            else:
                return

    return _start(restarting, name)


def start_thread(main: Callable[[], None], name: str) -> threading.Thread:
    """Run `main` in a daemon thread, for an optional job; log its error."""

    def reporting() -> None:
        try:
            main()
        except BaseException:
            log.exception("background thread failed", thread=name)

    return _start(reporting, name)


def _start(main: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=main, name=name, daemon=True)
    thread.start()
    return thread


class OneThread:
    """A daemon thread that runs calls one after another.

    The process can exit without waiting for it, unlike for asyncio's own threads.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = keep_thread_running(self._run, name)

    def call(self, function: Callable[..., _Result], *arguments: object) -> asyncio.Future[_Result]:
        """Queue a call of `function` and return the future of its result."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Result] = loop.create_future()

        def tell(set_outcome: Callable[[Any], None], outcome: object) -> None:
            if not done.done():
                set_outcome(outcome)

        def call() -> None:
            try:
                outcome: tuple[Callable[[Any], None], object]
                outcome = done.set_result, function(*arguments)
            except StopIteration as error:  # futures reject it, and would never be done
                outcome = done.set_exception, RuntimeError(f"{function} raised {error!r}")
            except BaseException as error:  # noqa: BLE001 - raised to the caller
                outcome = done.set_exception, error
            with suppress(RuntimeError):  # the loop is closed: nothing waits
                loop.call_soon_threadsafe(tell, *outcome)

        self._calls.put(call)
        return done

    def close(self) -> None:
        """End the thread after the queued calls."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


async def call_in_thread(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Call `function` in a new daemon thread and return its result."""
    thread = OneThread(getattr(function, "__name__", "call"))
    done = thread.call(function, *arguments)
    thread.close()
    return await done


def start_in_loop(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _Result]
) -> Future[_Result]:
    """Run `work` in the event loop of another thread; return its future, for this thread."""
    return asyncio.run_coroutine_threadsafe(work, loop)


def wait_for_loop(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _Result], timeout: float
) -> _Result:
    """Run `work` in the event loop of another thread, wait for it and return its result.

    Raises:
        TimeoutError: The work took longer than `timeout` seconds, and was cancelled.
    """
    running = start_in_loop(loop, work)
    try:
        return running.result(timeout)
    finally:
        running.cancel()


class ThreadPool:
    """A pool of at most `count` threads, named after `name`; dead threads are replaced."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._threads: list[threading.Thread] = []
        self._pool = self._new_pool()

    async def run(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Call `function` in one of the threads and return its result.

        Raises:
            BackgroundError: A thread died before the call began.
        """
        self._replace_dead()
        pool = self._pool
        call = pool.submit(function, *arguments)
        done = asyncio.wrap_future(call)
        try:
            while not done.done():
                await asyncio.wait({done}, timeout=LOOK_SECONDS)
                self._replace_dead()
                if pool is not self._pool and call.cancel():  # no thread started it
                    raise BackgroundError(f"a thread of {self._name!r} died; try again")
            return done.result()
        finally:
            done.cancel()

    def close(self) -> None:
        """Cancel queued calls and stop the threads, without waiting for running calls."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _replace_dead(self) -> None:
        """Create a new pool if a thread has died; the old threads finish their calls and end."""
        if not all(thread.is_alive() for thread in self._threads):
            log.error("background thread failed", thread=self._name)
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


def restart_delays() -> Iterator[float]:
    """Yield, at each failure, the seconds to wait before the restart."""
    delay, failed = FIRST_DELAY, time.monotonic()
    while True:
        yield delay
        last, failed = failed, time.monotonic()
        ran = failed - last
        delay = FIRST_DELAY if ran > STEADY_SECONDS else min(2 * delay, LONGEST_DELAY)
