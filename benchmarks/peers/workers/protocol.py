"""Messages between a worker and the program that measures it.

Each line is one JSON object. The program sends {"load": Setup} once, then any number of
{"run": [Request, ...]}, and closes the worker's stdin to end it. Each is answered by
one line: {"ready": {package: version}}, {"outcome": Outcome}, or {"error": text}. Peers that embed
get Texts, and answer with Embedded.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Protocol, TextIO, TypeVar


@dataclass(frozen=True, slots=True)
class Setup:
    """The model that a worker loads, and its resources.

    Attributes:
        model: Path of the model's directory or file.
        threads: Number of threads that compute.
        cache_gib: GiB of KV cache, for peers whose cache has a fixed size.
        options: Options that differ between a peer's variants.
    """

    model: str
    threads: int
    cache_gib: float
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids, and its output's length.

    Attributes:
        prompt: The token ids.
        output_tokens: Exact number of output tokens.
    """

    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts to embed.

    Attributes:
        texts: The texts.
        alone: Whether each is a call of its own, one after the other.
    """

    texts: list[str]
    alone: bool


@dataclass(frozen=True, slots=True)
class Embedded:
    """The outcome of `Texts`.

    Attributes:
        seconds: Time of each call, or of all texts together.
        embeddings: The embeddings of the first texts.
        note: The peer's choice of how to run it, if any.
    """

    seconds: list[float]
    embeddings: list[list[float]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a workload.

    Attributes:
        seconds: Time from handing over all requests to the last token.
        outputs: Token ids, in the requests' order.
        first_token_seconds: Time from the same start to each request's first token.
        note: The peer's choice of how to run it, if any.
    """

    seconds: float
    outputs: list[list[int]]
    first_token_seconds: list[float] | None = None
    note: str = ""


Asked_contra = TypeVar("Asked_contra", Request, Texts, contravariant=True)
Made_co = TypeVar("Made_co", Outcome, Embedded, covariant=True)


class Runs(Protocol[Asked_contra, Made_co]):
    """A loaded peer."""

    def run(self, requests: Sequence[Asked_contra]) -> Made_co:
        """Run requests, and time them."""


Runner = Runs[Request, Outcome]
"""A peer that generates: it runs requests greedily, all at once."""


def serve(
    load: Callable[[Setup], Runs[Asked_contra, Made_co]],
    packages: Sequence[str],
    kind: type[Asked_contra] = Request,
) -> None:
    """Execute commands from stdin until it is closed.

    Args:
        load: Loads the peer; an exception is reported and ends the worker.
        packages: Packages whose installed versions are reported.
        kind: Type of the requests.
    """
    answers = _claim_stdout()
    runner: Runs[Asked_contra, Made_co] | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if runner is None:
                runner = load(Setup(**command["load"]))
                _say(answers, {"ready": {package: version(package) for package in packages}})
            else:
                requests = [kind(**request) for request in command["run"]]
                _say(answers, {"outcome": asdict(runner.run(requests))})
        except Exception as error:  # noqa: BLE001 - any error is the peer's result
            traceback.print_exc()
            _say(answers, {"error": f"{type(error).__name__}: {error}"})
            if runner is None:
                break
    answers.flush()


def _claim_stdout() -> TextIO:
    """Keep stdout for answers; send what libraries print to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)
