"""Speak with a sandbox, the process that tries constraints before the engine compiles them."""

import json
import subprocess
import sys
from dataclasses import dataclass

from octavo.engine.constraints.constraint import Constraint, ConstraintError
from octavo.engine.constraints.token_table import TokenTable


@dataclass(frozen=True, slots=True)
class Trial:
    """What a constraint took that passed.

    Attributes:
        bytes: Of memory.
        seconds: Of processor time.
    """

    bytes: int
    seconds: float


class Sandbox:
    """A process that tries constraints; it is started again if it ends."""

    def __init__(self, table: TokenTable, seconds: float) -> None:
        """Start the process; it takes about a second to be ready.

        Args:
            table: The model's tokens.
            seconds: Processor time that a constraint may take.
        """
        self._table = table
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = self._start()

    def check(self, constraint: Constraint) -> Trial:
        """Try a constraint, and wait for the outcome.

        Raises:
            ConstraintError: It is not valid or not supported, or exceeds a limit.
        """
        asked = {
            "kind": constraint.kind.value,
            "texts": constraint.texts,
            "seconds": self._seconds,
        }
        found = json.loads(self._ask(json.dumps(asked)))
        if found["error"] is not None:
            raise ConstraintError(found["error"])
        return Trial(int(found["bytes"]), float(found["seconds"]))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, line: str) -> str:
        """Send a line and return the answer; if the process ended, try once with another."""
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
            process_group=0,  # Ctrl-C is the engine's to handle
        )
        assert process.stdin is not None
        table = {
            "json": self._table.json,
            "size": self._table.size,
            "eos_token_ids": self._table.eos_token_ids,
        }
        process.stdin.write(json.dumps(table) + "\n")
        return process
