"""Background tasks and threads: restarted, joined or logged, and created in one place."""

import ast
import asyncio
import ctypes
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from octavo.common import background
from octavo.common.background import (
    BackgroundError,
    OneThread,
    ThreadPool,
    call_in_thread,
    end,
    first_to_end,
    joined,
    keep_running,
    keep_thread_running,
    report_failure,
    start_thread,
)

ROOT = Path(__file__).parents[2]
HELPER = ROOT / "octavo" / "common" / "background.py"
MAKERS = {
    *("create_task", "ensure_future", "run_in_executor", "run_coroutine_threadsafe"),
    *("Thread", "Timer", "ThreadPoolExecutor", "start_new_thread", "start_http_server"),
}


class Log:
    """The log's entries by event."""

    def __init__(self):
        self.events: list[tuple[str, dict]] = []

    def exception(self, event, **fields):
        self.events.append((event, fields))

    error = exception


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(background, "log", log := Log())
    return log


async def until(condition, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.005)


async def test_a_task_that_fails_is_started_again(log):
    runs = 0

    async def main():
        nonlocal runs
        runs += 1
        if runs == 1:
            raise RecursionError
        if runs == 2:  # the awaited task is cancelled, not this one
            raise asyncio.CancelledError
        await asyncio.Event().wait()

    task = keep_running(main, "restless")
    await until(lambda: runs == 3)
    assert [(event, fields["task"]) for event, fields in log.events] == [
        ("background task failed", "restless")
    ] * 2
    await end(task)
    assert task.cancelled()


async def test_a_task_that_returns_is_not_started_again(log):
    async def main():
        return

    await keep_running(main, "done")
    assert not log.events


async def test_restarts_come_further_and_further_apart(log, monkeypatch):
    monkeypatch.setattr(background, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(background, "LONGEST_DELAY", 0.004)

    async def main():
        raise OSError

    task = keep_running(main, "hopeless")
    await until(lambda: len(log.events) >= 4)
    await end(task)
    delays = [fields["restart_seconds"] for _, fields in log.events[:4]]
    assert delays == [0.001, 0.002, 0.004, 0.004]


async def test_a_failure_after_a_steady_run_restarts_soon(log, monkeypatch):
    monkeypatch.setattr(background, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(background, "LONGEST_DELAY", 0.004)
    monkeypatch.setattr(background, "STEADY_SECONDS", 0.1)

    async def main():
        if len(log.events) == 3:
            await asyncio.sleep(0.2)
        raise OSError

    task = keep_running(main, "steady")
    await until(lambda: len(log.events) >= 5)
    await end(task)
    delays = [fields["restart_seconds"] for _, fields in log.events[:5]]
    assert delays == [0.001, 0.002, 0.004, 0.001, 0.002]


async def test_a_job_that_fails_is_told_of(log):
    async def main():
        raise OSError

    await report_failure(main, "job")
    assert log.events[0][1] == {"task": "job"}


async def test_what_a_block_does_not_raise_is_logged(log):
    async def fail(error):
        raise error

    async def last():
        await asyncio.Event().wait()

    tasks = []

    async def block():
        works = fail(ValueError("seen")), fail(OSError("missed")), fail(KeyError("known")), last()
        async with joined(*works, names=("a", "b", "c"), expected=(KeyError,)) as made:
            tasks.extend(made)
            await asyncio.wait(made[:3])
            made[0].result()

    with pytest.raises(ValueError, match="seen"):
        await block()
    assert all(task.done() for task in tasks)
    assert [fields["task"] for _, fields in log.events] == ["b"]


async def test_the_first_end_is_an_error(log):
    async def fail():
        raise OSError("disk")

    async def wait():
        await asyncio.Event().wait()

    with pytest.raises(BackgroundError, match="core stopped unexpectedly") as caught:
        await first_to_end(core=fail(), server=wait())
    assert str(caught.value.__cause__) == "disk"
    assert not log.events


async def test_a_thread_that_fails_is_started_again_or_told_of(log):
    runs, stop = 0, threading.Event()

    def main():
        nonlocal runs
        runs += 1
        if runs == 1:
            raise SystemExit
        stop.wait()

    thread = keep_thread_running(main, "restless")
    await until(lambda: runs == 2)
    stop.set()
    thread.join()
    start_thread(lambda: 1 / 0, "job").join()
    assert [fields["thread"] for _, fields in log.events] == ["restless", "job"]


async def test_one_thread_makes_all_calls():
    thread = OneThread("only")
    names = [await thread.call(lambda: threading.current_thread().name) for _ in range(3)]
    assert names == ["only"] * 3
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 / 0)
    thread.close()
    assert await call_in_thread(max, 1, 2) == 2
    with pytest.raises(RuntimeError, match="raised StopIteration"):  # which completes no future
        await asyncio.wait_for(call_in_thread(next, iter(())), 5)


async def test_worker_threads_that_die_are_replaced(log, monkeypatch):
    monkeypatch.setattr(background, "LOOK_SECONDS", 0.05)
    workers = ThreadPool(1, "worker")
    assert await workers.run(max, 1, 2) == 2
    (thread,) = workers._threads
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(MemoryError)
    )
    with pytest.raises(BackgroundError, match="died"):  # this call wakes the thread and is lost
        await workers.run(max, 1, 2)
    assert await workers.run(max, 1, 2) == 2
    assert log.events == [("background thread failed", {"thread": "worker"})]
    workers.close()


@pytest.mark.parametrize("folder", ["engine", "kernels", "octavo", "router"])
def test_nothing_else_makes_tasks_or_threads(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != HELPER
        for line in makers(ast.parse(path.read_text()))
    ]
    assert not found, "octavo.common.background is to make these"


def makers(tree: ast.AST) -> list[int]:
    """Find calls that create tasks or threads which could end silently.

    It ignores task groups and pools, whose block waits for them, and threads that are joined at
    once.
    """
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.With | ast.AsyncWith)]
    items = [item for block in blocks for item in block.items]
    managed = {id(item.context_expr) for item in items}
    groups = {
        item.optional_vars.id
        for item in items
        if isinstance(item.optional_vars, ast.Name)
        and ast.unparse(item.context_expr) == "asyncio.TaskGroup()"
    }
    awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in managed:
            continue
        *receiver, name = ast.unparse(node.func).rsplit(".", 1)
        if (name in MAKERS and receiver[:1] not in [[group] for group in groups]) or (
            name == "to_thread" and id(node) not in awaited
        ):
            lines.append(node.lineno)
    return lines


def test_makers_are_found():
    text = """
async def f(loop):
    asyncio.create_task(g())
    async with asyncio.TaskGroup() as group:
        group.create_task(g())
    with ThreadPoolExecutor() as pool:
        pass
    Thread(target=g)
    await asyncio.to_thread(g)
    x = asyncio.to_thread(g)
    loop.run_in_executor(None, g)
"""
    assert makers(ast.parse(text)) == [3, 8, 10, 11]


STARTER = """
import subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-m", "octavo.common.parent_watch", "tests.common.watched_module"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
)
child.stdout.readline()
print(flush=True)
time.sleep(600)
"""


def test_a_watched_module_and_its_children_end_with_the_starter():
    with subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, cwd=ROOT
    ) as starter:
        assert starter.stdout is not None
        starter.stdout.readline()
        processes = psutil.Process(starter.pid).children(recursive=True)
        assert len(processes) == 2
        starter.kill()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
