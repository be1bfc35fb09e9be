"""Tries constraints in processes that may fail: some never end, and some crash the library.

    python -m octavo.engine.constraints.sandbox

This process reads the token table and then constraints from standard input, one line of JSON each,
and forks for every constraint. The fork has limits of time, memory and stack; the outcome is a line
of JSON on standard output.
"""

import json
import os
import resource
import select
import signal
import sys
from typing import Any

from llguidance import LLTokenizer

from octavo.common.thread_priority import lower_priority, run_when_idle
from octavo.engine.constraints.constraint import Constraint, ConstraintError, ConstraintKind
from octavo.engine.constraints.token_table import TokenTable
from octavo.engine.constraints.trial import MAX_MASK_SECONDS, try_constraint

STACK_BYTES = 2 << 20
"""Stack size, a quarter of the engine's threads': a constraint that fits here fits there."""
MEMORY_BYTES = 1 << 30
"""Maximum memory of a trial besides the process's own."""
WALL_FACTOR = 20
"""Factor of the time limit for a trial that gets little processor time."""


def main() -> None:
    """Serve until standard input ends."""
    lower_priority()
    first = json.loads(sys.stdin.readline())
    tokens = TokenTable(first["json"], first["size"], tuple(first["eos_token_ids"])).build()
    for line in sys.stdin:
        asked = json.loads(line)
        constraint = Constraint(ConstraintKind(asked["kind"]), tuple(asked["texts"]))
        outcome = _fork(constraint, tokens, asked["seconds"], when_idle=asked["when_idle"])
        print(json.dumps(outcome), flush=True)


def _fork(
    constraint: Constraint, tokens: LLTokenizer, seconds: float, *, when_idle: bool
) -> dict[str, Any]:
    """Try a constraint in a fork and return its outcome."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            if when_idle:
                run_when_idle()
            os.write(writing, json.dumps(_limited(constraint, tokens, seconds)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    ended = bool(select.select([reading], [], [], WALL_FACTOR * seconds)[0])
    if not ended:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading, "rb") as pipe:
        outcome = pipe.read()
    _, status = os.waitpid(child, 0)
    if outcome:
        result: dict[str, Any] = json.loads(outcome)
        return result
    code = os.waitstatus_to_exitcode(status)
    if not ended or -code in {signal.SIGPROF, signal.SIGKILL}:
        why = f"it takes more than {seconds:g} s to compile; make it simpler"
        return {"error": why, "too_slow": True}
    return {"error": _why(code)}


def _limited(constraint: Constraint, tokens: LLTokenizer, seconds: float) -> dict[str, Any]:
    """Try a constraint in this process, under limits."""
    size, resident = _memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        try_constraint(constraint, tokens, in_sandbox=True)
    except ConstraintError as error:
        return {"error": str(error)}
    return {"error": None, "bytes": max(0, _memory()[1] - resident)}


def _memory() -> tuple[int, int]:
    """Return this process' bytes of address space and of memory."""
    with open("/proc/self/statm") as file:  # noqa: PTH123 - in a fork
        size, resident = file.read().split()[:2]
    return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _why(code: int) -> str:
    """Return why a fork has no outcome."""
    if -code == signal.SIGVTALRM:
        return f"a mask takes more than {MAX_MASK_SECONDS} s to compute; make it simpler"
    if code == -signal.SIGSEGV:
        return "it is nested too deeply"
    return f"it takes more than {MEMORY_BYTES >> 20} MiB to compile; make it simpler"


if __name__ == "__main__":
    main()
