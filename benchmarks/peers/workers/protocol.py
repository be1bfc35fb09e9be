"""What a worker and the program that measures it say to each other.

One JSON object a line. The program sends {"load": Setup} once, then any number of
{"run": [Request, ...]}, and closes the worker's stdin to end it. Each is answered by
one line: {"ready": {package: version}}, {"outcome": Outcome}, or {"error": text}.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Protocol, TextIO


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is to load, and what it may use.

    Attributes:
        model: path of the model's directory or file.
        threads: to compute with.
        cache_gib: GiB of KV cache, for peers whose cache has a fixed size.
        options: what tells variants of one peer apart.
    """

    model: str
    threads: int
    cache_gib: float
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids, and how many tokens are to follow it, whatever they are.

    Attributes:
        prompt: the token ids.
        output_tokens: how many are to follow.
    """

    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A workload that was run.

    Attributes:
        seconds: from handing over the requests, all at once, to the last token.
        outputs: token ids, in the requests' order.
        first_token_seconds: from the same start to each request's first token.
        note: how it was run, where the peer had a choice.
    """

    seconds: float
    outputs: list[list[int]]
    first_token_seconds: list[float] | None = None
    note: str = ""


class Runner(Protocol):
    """A loaded peer."""

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Runs requests greedily and times them; all are there at the start."""


def serve(load: Callable[[Setup], Runner], packages: Sequence[str]) -> None:
    """A worker's main loop: obeys commands from stdin until it is closed.

    Args:
        load: loads the peer; what it raises is reported, and ends the worker.
        packages: whose installed versions are reported.
    """
    answers = _claim_stdout()
    runner: Runner | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if runner is None:
                runner = load(Setup(**command["load"]))
                _say(answers, {"ready": {package: version(package) for package in packages}})
            else:
                requests = [Request(**request) for request in command["run"]]
                _say(answers, {"outcome": asdict(runner.run(requests))})
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
            traceback.print_exc()
            _say(answers, {"error": f"{type(error).__name__}: {error}"})
            if runner is None:
                break
    answers.flush()


def _claim_stdout() -> TextIO:
    """Keeps stdout for answers: what libraries print there goes to stderr instead."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)
