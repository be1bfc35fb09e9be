"""`octavo bench`: the load that a server bears, by synthetic requests."""

import asyncio
import contextlib
import dataclasses
import json
import random
import statistics
import time
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from octavo.cli.generate import Address
from octavo.cli.local_server import local_server
from octavo.cli.output import err, failures, out
from octavo.client import AsyncClient, Delta, Error, Model, NotFoundError
from octavo.client.channel import DEFAULT_ADDRESS


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """One request that succeeded; times in seconds."""

    first: float
    total: float
    tokens: int

    @property
    def per_token(self) -> float:
        """Time per output token after the first."""
        return (self.total - self.first) / max(self.tokens - 1, 1)


def bench(
    address: Address = DEFAULT_ADDRESS,
    model: Annotated[str | None, typer.Option(help="Model; needed if several are served.")] = None,
    requests: Annotated[int, typer.Option("--requests", "-r", min=1, help="How many.")] = 64,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, help="At once.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens per output.")] = 128,
    seed: Annotated[int, typer.Option(help="Draws the prompts.")] = 0,
    serve: Annotated[
        str | None, typer.Option(help="Start a server with this model for the run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure a server: random prompts, fixed lengths, greedy.

    Times are the client's: from sending a request to reading its first token
    (TTFT), and from there to its end, per token (TPOT).
    """
    server = local_server(serve) if serve else contextlib.nullcontext(address)
    with server as at, failures(at):
        timings, errors, wall = asyncio.run(
            _bench(at, model, requests, concurrency, prompt_tokens, output_tokens, seed)
        )
    result = summarize(timings, wall) | {"failed": len(errors)}
    typer.echo(json.dumps(result)) if as_json else out.print(_table(result))
    for message in sorted(set(errors)):
        err.print(f"[red]{escape(message)}[/]")
    if errors:
        raise typer.Exit(1)


async def _bench(
    address: str,
    name: str | None,
    requests: int,
    concurrency: int,
    prompt_tokens: int,
    output_tokens: int,
    seed: int,
) -> tuple[list[Timing], list[str], float]:
    """Keeps `concurrency` requests in flight. Returns timings, errors and wall time."""
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    timings: list[Timing] = []
    errors: list[str] = []
    async with AsyncClient(address) as client:
        model = await _model(client, name)
        # The first tokens of a vocabulary are often special ones.
        prompts = iter(
            [draw.randrange(256, model.vocab_size) for _ in range(prompt_tokens)]
            for _ in range(requests)
        )

        async def work() -> None:
            for prompt in prompts:
                try:
                    timings.append(await _once(client, model.name, prompt, output_tokens))
                except Error as error:
                    errors.append(str(error))

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(min(concurrency, requests))))
        return timings, errors, time.perf_counter() - started


async def _model(client: AsyncClient, name: str | None) -> Model:
    """The model to measure: the one named, else the first."""
    models = await client.list_models(timeout=5)
    for model in models:
        if name in (None, model.name):
            return model
    import grpc  # noqa: PLC0415 - only for its code

    served = ", ".join(model.name for model in models) or "none"
    raise NotFoundError(grpc.StatusCode.NOT_FOUND, f"no model {name or ''!r}; served: {served}")


async def _once(client: AsyncClient, model: str, prompt: list[int], tokens: int) -> Timing:
    """Sends one request and times it."""
    started = time.perf_counter()
    first = None
    stream = client.generate(
        prompt, model=model, max_tokens=tokens, temperature=0, ignore_eos=True, token_ids=True
    )
    async for event in stream.events():
        if isinstance(event, Delta) and first is None:
            first = time.perf_counter()
    ended = time.perf_counter()
    drawn = sum(end.usage.output_tokens for end in stream.finished)
    return Timing((first or ended) - started, ended - started, drawn)


def summarize(timings: list[Timing], wall: float) -> dict[str, float]:
    """The figures of a run: rates per second of wall time, times in milliseconds."""
    tokens = sum(timing.tokens for timing in timings)
    figures = {
        "requests": len(timings),
        "seconds": round(wall, 3),
        "output_tokens": tokens,
        "output_tokens_per_s": round(tokens / wall, 1),
        "requests_per_s": round(len(timings) / wall, 2),
    }
    for name, values in (
        ("ttft_ms", [timing.first for timing in timings]),
        ("tpot_ms", [timing.per_token for timing in timings if timing.tokens > 1]),
    ):
        if values:
            figures[f"{name}_mean"] = round(statistics.fmean(values) * 1e3, 2)
            figures[f"{name}_p50"] = round(statistics.median(values) * 1e3, 2)
            figures[f"{name}_p99"] = round(_percentile(values, 0.99) * 1e3, 2)
    return figures


def _percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile."""
    ranked = sorted(values)
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)]


def _table(result: dict[str, float]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in result.items():
        table.add_row(f"[dim]{name.replace('_', ' ')}[/]", f"{value:,}")
    return table
