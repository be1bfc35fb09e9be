"""A worker seen from the program that measures: start, ask, stop for a while, end."""

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.process_session import SessionProcess
from benchmarks.peers.workers.protocol import Outcome, Request, Setup

BENCHMARKS = Path(__file__).parents[1]


def worker_command(python: Path, worker: str) -> list[str]:
    """Return what runs a module of `workers`, with the Python of its environment."""
    return [str(python), "-P", "-m", f"peers.workers.{worker}"]


def worker_variables(threads: int, *more: Path) -> dict[str, str]:
    """Return a worker's environment variables.

    Args:
        threads: to compute with.
        more: folders to import from.
    """
    paths = os.pathsep.join(map(str, (BENCHMARKS, *more)))
    return {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}


class WorkerError(Exception):
    """A worker failed. The message says why, in its own words if it had any."""


class WorkerProcess(SessionProcess):
    """Start a worker; see `SessionProcess`.

    Args:
        command: to run.
        variables: added to the environment.
        log: file that gets what it prints.
        patience: seconds that each answer may take.
        directory: to run it in, if not in this process's.
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
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, **variables},
                cwd=directory,
                text=True,
                start_new_session=True,  # ctrl-C is ours to handle
            )
        super().__init__(process, log)

    def load(self, setup: Setup) -> dict[str, str]:
        """Load the model; return the versions of the worker's packages.

        Raises:
            WorkerError: it cannot.
        """
        return self._ask({"load": asdict(setup)}, "ready")

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Run requests and check that each got exactly the tokens it asked for.

        Raises:
            WorkerError: it failed, or did not do what it was asked.
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

    def close(self) -> None:
        """End it: by closing its stdin, then by SIGKILL."""
        super().close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask_to_end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

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
            raise WorkerError(f"it died: ...{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        found: dict[str, Any] = answer[wanted]
        return found
