"""A worker as the measuring program sees it: start, run requests, suspend, end."""

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.peers.workers.protocol import Embedded, Outcome, Request, Setup, Texts

BENCHMARKS = Path(__file__).parents[1]
LOGGED_CHARACTERS = 300
END_SECONDS = 60.0
"""Seconds to wait for a worker to exit before killing it."""


def worker_command(python: Path, worker: str) -> list[str]:
    """Return the command that runs a module of `workers` in its environment."""
    return [str(python), "-P", "-m", f"peers.workers.{worker}"]


def worker_variables(threads: int, *more: Path) -> dict[str, str]:
    """Return a worker's environment variables.

    Args:
        threads: Number of threads that compute.
        more: Folders to import from.
    """
    paths = os.pathsep.join(map(str, (BENCHMARKS, *more)))
    return {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}


class WorkerError(Exception):
    """A worker failed. The message has the worker's reason, if any."""


class WorkerProcess:
    """A worker that leads a session; the worker and its descendants end with the `with` block.

    Args:
        command: Command to run.
        variables: Variables added to the environment.
        log: File for its output.
        patience: Maximum seconds per answer.
        directory: Working directory; None: this process'.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
        patience: float,
        directory: Path | None = None,
    ) -> None:
        self._patience = patience
        self._log = log
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, **variables},
                cwd=directory,
                text=True,
                start_new_session=True,  # this process handles ctrl-C
            )

    def load(self, setup: Setup) -> dict[str, str]:
        """Load the model; return the versions of the worker's packages.

        Raises:
            WorkerError: The worker cannot load it.
        """
        return self._ask({"load": asdict(setup)}, "ready")

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Run requests and check that each got exactly the requested number of tokens.

        Raises:
            WorkerError: The worker failed, or an output has another length.
        """
        asked = {"run": [asdict(request) for request in requests]}
        outcome = Outcome(**self._ask(asked, "outcome"))
        if len(outcome.outputs) != len(requests):
            raise WorkerError(f"{len(requests)} requests, {len(outcome.outputs)} outputs")
        for number, request in enumerate(requests):
            made = len(outcome.outputs[number])
            if made != request.output_tokens:
                raise WorkerError(
                    f"request {number} asked for {request.output_tokens} tokens and got {made}"
                )
        return outcome

    def embed(self, texts: Texts) -> Embedded:
        """Embed texts.

        Raises:
            WorkerError: The worker failed.
        """
        return Embedded(**self._ask({"run": [asdict(texts)]}, "outcome"))

    def pause(self) -> None:
        """Suspend the worker and its descendants, so that they cost only memory."""
        for process in self._members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Continue them."""
        for process in reversed(self._members()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def close(self) -> None:
        """Close its stdin; after `END_SECONDS` kill it, and then its descendants."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.resume()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._kill()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kill(self) -> None:
        for process in self._members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _members(self) -> list[psutil.Process]:
        """Return the processes of its session, even if the worker has died."""
        family = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self._process.pid:
                    family.append(process)
        return family

    def _ask(self, message: dict[str, Any], wanted: str) -> dict[str, Any]:
        """Send a command; return the answer under the key `wanted`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(self._patience, self._kill)
        timer.start()
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late = not timer.is_alive()
            timer.cancel()
        if late:
            raise WorkerError(f"no answer within {self._patience:.0f} s")
        if not line:
            logged = " ".join(self._log.read_text(errors="replace").split())
            raise WorkerError(f"it died: ...{logged[-LOGGED_CHARACTERS:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        found: dict[str, Any] = answer[wanted]
        return found
