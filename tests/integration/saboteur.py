"""`octavo` in a process whose background tasks and threads can be killed from outside.

    python -m tests.integration.saboteur FOLDER ARGUMENT...

The process writes the names of its tasks and threads to FOLDER/names, again and again. When
FOLDER/kill has a name, an exception is thrown into what bears it, and the file is removed.
"""

import asyncio
import ctypes
import os
import sys
import threading
from pathlib import Path
from types import CoroutineType

import uvloop

ROOT = Path(__file__).parents[2]
SECONDS = 0.05
run_loop = uvloop.run


class KilledByTestError(Exception):
    """What is thrown."""


async def strike(folder: Path) -> None:
    while True:
        await asyncio.sleep(SECONDS)
        tasks = {name_of(task): task for task in asyncio.all_tasks() if is_ours(task)}
        threads = {thread.name: thread for thread in threading.enumerate()}
        fresh = folder / f"names.{os.getpid()}"
        fresh.write_text("\n".join(sorted({*tasks, *threads})))
        fresh.rename(folder / "names")
        order = folder / "kill"
        if not order.exists():
            continue
        name = order.read_text()
        if name in threads:
            kill_thread(threads[name])
        elif name in tasks and not kill_task(tasks[name]):
            continue
        order.unlink()


def is_ours(task: asyncio.Task) -> bool:
    """Whether Octavo made a task: gRPC's are Cython's, and other libraries' have no names."""
    work = task.get_coro()
    if not isinstance(work, CoroutineType):
        return False
    named = not task.get_name().startswith("Task-")
    return named or Path(work.cr_code.co_filename).is_relative_to(ROOT)


def name_of(task: asyncio.Task) -> str:
    name = task.get_name()
    return task.get_coro().__qualname__ if name.startswith("Task-") else name


def kill_task(task: asyncio.Task) -> bool:
    """Fail the future that a task waits for; a task that waits for another is left alone."""
    waits_for = task._fut_waiter
    if waits_for is None or isinstance(waits_for, asyncio.Task) or waits_for.done():
        return False
    waits_for.set_exception(KilledByTestError(task.get_name()))
    return True


def kill_thread(thread: threading.Thread) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(KilledByTestError)
    )


def run(main) -> None:
    async def both() -> None:
        striking = asyncio.ensure_future(strike(Path(sys.argv[1])))
        striking.set_name("saboteur")
        try:
            await main
        finally:
            striking.cancel()

    run_loop(both())


if __name__ == "__main__":
    uvloop.run = run
    from octavo.cli import app

    sys.argv[0] = "octavo"
    arguments = sys.argv[2:]
    app(arguments)
