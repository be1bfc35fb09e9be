"""A worker seen from the program that measures: start, ask, stop for a while, end."""

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from benchmarks.peers import process_session
from benchmarks.peers.workers.protocol import Outcome, Request, Setup

END_SECONDS = 60.0


class WorkerError(Exception):
    """A worker failed. The message says why, in its own words if it had any."""


class WorkerProcess:
    """Start a worker; it and its descendants end with the `with` block.

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
                start_new_session=True,  # ctrl-C is ours to handle
            )

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

    def pause(self) -> None:
        """Stop it and its descendants, so that they cost only memory."""
        process_session.suspend(self._process.pid)

    def resume(self) -> None:
        """Continue them."""
        process_session.resume(self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it: by closing its stdin, then by SIGKILL."""
        self.resume()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _kill(self) -> None:
        process_session.kill(self._process.pid)

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

    def _last_words(self) -> str:
        """The end of its log, as one line."""
        return " ".join(self._log.read_text(errors="replace").split())[-300:]
