"""Run Python modules in processes forked from one that has imported everything.

A server imports torch and transformers for ten CPU seconds. Most tests check what follows; tests of
the start run the program itself.
"""

import asyncio
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

from benchmarks.fixture import PRELOAD


class Process:
    """`python -m MODULE ARGUMENT...`, with the parts of `subprocess.Popen` that tests use.

    Args:
        module: The module to run.
        arguments: Its arguments.
        output: The file for its output.
        errors: Whether the file also gets its stderr.
        environment: Its environment variables; default: this process'.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        output: Path,
        *,
        errors: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        output.touch()  # readers may come before the process writes
        variables = dict(os.environ if environment is None else environment)
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["octavo.cli.engine_group", *PRELOAD])
        self._process = server.Process(
            target=_run, args=(module, list(arguments), output, errors, variables)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.returncode) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    module: str, arguments: list[str], output: Path, errors: bool, environment: dict[str, str]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sink = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(sink, sys.stdout.fileno())
    if errors:
        os.dup2(sink, sys.stderr.fileno())
    sys.argv[1:] = arguments
    # `octavo serve` would start an interpreter that imports everything again.
    multiprocessing.get_context = lambda _=None: _Fork()  # type: ignore[assignment]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class _Fork(ForkContext):
    """Forks a process instead of starting an interpreter."""

    def Process(self, *, target: Any, args: Any, name: str) -> Any:  # noqa: N802
        return super().Process(target=_run_child, args=(target, args), name=name)


def _run_child(target: Any, args: Any) -> None:
    """Drop the parent's event loop and signal handlers."""
    asyncio._set_running_loop(None)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    target(*args)
