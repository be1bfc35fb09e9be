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
        model: Path of the model's directory or file.
        threads: To compute with.
        cache_gib: GiB of KV cache, for peers whose cache has a fixed size.
        options: What tells variants of one peer apart.
    """

    model: str
    threads: int
    cache_gib: float
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids, and how many tokens are to follow it, whatever they are.

    Attributes:
        prompt: The token ids.
        output_tokens: How many are to follow.
    """

    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A workload that was run.

    Attributes:
        seconds: From handing over the requests, all at once, to the last token.
        outputs: Token ids, in the requests' order.
        first_token_seconds: From the same start to each request's first token.
        note: How it was run, where the peer had a choice.
    """

    seconds: float
    outputs: list[list[int]]
    first_token_seconds: list[float] | None = None
    note: str = ""


class Runner(Protocol):
    """A loaded peer."""

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Run requests greedily and times them; all are there at the start."""


def serve(load: Callable[[Setup], Runner], packages: Sequence[str]) -> None:
    """Obey commands from stdin until it is closed.

    Args:
        load: Loads the peer; an exception is reported and ends the worker.
        packages: Packages whose installed versions are reported.
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
    """Keep stdout for answers: what libraries print there goes to stderr instead."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)
