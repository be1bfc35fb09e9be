"""Talks to a sandbox, the process that tries constraints before the engine compiles them."""

import json
import subprocess
import sys

from octavo.engine.constraints.constraint import Constraint, ConstraintError
from octavo.engine.constraints.token_table import TokenTable


class TrialTooSlowError(ConstraintError):
    """A constraint exceeds its processor time."""


class Sandbox:
    """A process that tries constraints; it restarts if it ends."""

    def __init__(self, table: TokenTable, seconds: float, *, when_idle: bool) -> None:
        """Start the process; it takes about a second to be ready.

        Args:
            table: The model's tokens.
            seconds: Maximum processor time of a constraint.
            when_idle: Whether trials run only when no other thread needs the processor.
        """
        self._table = table
        self._limits = {"seconds": seconds, "when_idle": when_idle}
        self._process: subprocess.Popen[str] | None = self._start()

    def check(self, constraint: Constraint) -> int:
        """Try a constraint, and wait for the outcome.

        Returns:
            The bytes of memory that the constraint takes.

        Raises:
            TrialTooSlowError: It takes too long.
            ConstraintError: It is not valid or not supported, or exceeds another limit.
        """
        asked = {"kind": constraint.kind.value, "texts": constraint.texts, **self._limits}
        answer = json.loads(self._ask(json.dumps(asked)))
        if answer["error"] is None:
            return int(answer["bytes"])
        raise (TrialTooSlowError if answer.get("too_slow") else ConstraintError)(answer["error"])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, line: str) -> str:
        """Send a line and return the answer; if the process ended, retry once with a new one."""
        for _ in range(2):
            try:
                answer = self._exchange(line)
            except BrokenPipeError:
                answer = ""
            if answer:
                return answer
            self.close()
        raise ConstraintError("the process that compiles it ended; it may take too much memory")

    def _exchange(self, line: str) -> str:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return process.stdout.readline()

    def _start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo.engine.constraints.sandbox"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # the engine handles Ctrl-C
        )
        assert process.stdin is not None
        table = {
            "json": self._table.json,
            "size": self._table.size,
            "eos_token_ids": self._table.eos_token_ids,
        }
        process.stdin.write(json.dumps(table) + "\n")
        return process
