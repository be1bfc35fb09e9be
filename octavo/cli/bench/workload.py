"""Requests of a run and their arrival times."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt
import typer
from pydantic import BaseModel, Field, PositiveInt, ValidationError, model_validator

from octavo.cli.bench.settings import (
    DEFAULT_REQUESTS,
    Dataset,
    Lengths,
    Open,
    Shape,
    Synthetic,
    Workload,
)
from octavo.client import Message, Prompt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Seeds of the generators, which differ so that their numbers are independent.
_LENGTHS, _TOKENS, _ARRIVALS = range(3)

FIRST_TOKEN = 256
"""Lowest token id of random prompts; lower ids are often special tokens."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to send."""

    prompt: Prompt
    max_tokens: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, as its server describes it.

    Attributes:
        max_model_len: Maximum tokens of prompt and output together; None if unknown.
        vocab_size: Upper limit of token ids in random prompts.
    """

    name: str
    max_model_len: int | None
    vocab_size: int


def make_requests(workload: Workload, model: ServedModel) -> list[BenchRequest]:
    """Return the requests, which depend only on the workload and the model.

    Raises:
        typer.BadParameter: Fixed lengths exceed the model's context, or the dataset
            is malformed.
    """
    if isinstance(workload.source, Dataset):
        return _from_dataset(workload.source, workload)
    return _random_requests(workload.source, workload, model)


def draw_lengths(lengths: Lengths, rng: np.random.Generator, count: int, most: int | Ints) -> Ints:
    """Sample `count` lengths in tokens from 1 to `most`, which is [count] or a number."""
    match lengths.shape:
        case Shape.NORMAL:
            drawn = rng.normal(lengths.mean, lengths.spread, count)
        case Shape.LOGNORMAL:
            variance = math.log1p((lengths.spread / lengths.mean) ** 2)
            drawn = rng.lognormal(math.log(lengths.mean) - variance / 2, math.sqrt(variance), count)
        case _:
            drawn = np.full(count, lengths.mean)
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)


def arrival_times(plan: Open, count: int, seed: int) -> Floats:
    """Return the due times of requests in seconds, [count]; the first is 0.

    For one seed, the times at two rates differ by a factor only.
    """
    rng = np.random.default_rng([seed, _ARRIVALS])
    gaps = rng.gamma(plan.burstiness, 1 / (plan.rate * plan.burstiness), max(count - 1, 0))
    return np.concatenate([[0.0], np.cumsum(gaps)])[:count]


def _random_requests(
    source: Synthetic, workload: Workload, model: ServedModel
) -> list[BenchRequest]:
    count = workload.count or DEFAULT_REQUESTS
    most = (model.max_model_len or 1 << 20) - source.prefix
    _check_fits(source, model, most)
    rng = np.random.default_rng([workload.seed, _LENGTHS])
    prompts = draw_lengths(source.prompt, rng, count, most - 1)
    outputs = draw_lengths(source.output, rng, count, most - prompts)
    rng = np.random.default_rng([workload.seed, _TOKENS])
    low = min(FIRST_TOKEN, model.vocab_size // 2)
    prefix = rng.integers(low, model.vocab_size, source.prefix).tolist()
    return [
        BenchRequest(
            prefix + rng.integers(low, model.vocab_size, int(prompt)).tolist(),
            int(output),
            workload.ignore_eos,
        )
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _check_fits(source: Synthetic, model: ServedModel, most: int) -> None:
    """Reject fixed lengths that are too long; random lengths are clipped instead."""
    needed = 2
    if source.prompt.shape is Shape.FIXED:
        needed = round(source.prompt.mean) + round(source.output.mean)
    if needed > most:
        raise typer.BadParameter(
            f"{needed + source.prefix} tokens of prompt and output exceed the "
            f"{model.max_model_len} of {model.name}; set shorter lengths"
        )


def _from_dataset(dataset: Dataset, workload: Workload) -> list[BenchRequest]:
    """Return the file's requests, repeated from the start if more are needed."""
    lines = [
        BenchRequest(line.content, line.max_tokens or dataset.max_tokens, workload.ignore_eos)
        for line in _read(dataset.path)
    ]
    if not lines:
        raise typer.BadParameter(f"--dataset {dataset.path}: the file has no prompt")
    count = workload.count or len(lines)
    return [lines[i % len(lines)] for i in range(count)]


class _Turn(BaseModel):
    role: str
    content: str


class _Line(BaseModel):
    """A line of a dataset; other keys are ignored."""

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[_Turn], Field(min_length=1)] | None = None
    max_tokens: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("a line needs either `prompt` or `messages`")
        return self

    @property
    def content(self) -> str | Sequence[Message]:
        """The prompt for the client."""
        if self.prompt is not None:
            return self.prompt
        return [Message(turn.role, turn.content) for turn in self.messages or ()]


def _read(path: Path) -> Iterator[_Line]:
    """Yield the lines that are not blank."""
    try:
        for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
            if not text.strip():
                continue
            try:
                yield _Line.model_validate_json(text)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                why = f"{where}: {first['msg']}" if where else first["msg"]
                raise typer.BadParameter(f"--dataset {path}, line {number}: {why}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--dataset {path}: {error}") from None
