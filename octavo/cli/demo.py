"""`octavo demo`: start a server with the demo model and send it several requests at once."""

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel

from octavo.cli.extras import require
from octavo.cli.local_server import local_server
from octavo.cli.output import bar, err, fail, failures, out, warning
from octavo.client import AsyncClient, Delta, Message, Model
from octavo.common.background import end, keep_running
from octavo.common.models import resolve as models
from octavo.common.models.errors import ModelError

QUESTIONS = (
    "What is the capital of France?",
    "Explain in three sentences why the sky is blue.",
    "Give me three uses for an old book.",
    "How do I boil an egg? List the steps.",
)
SERVER = ("--num-blocks", "64", "--max-model-len", "1024")
"""Flags for a small KV cache, so that its use is visible."""


@dataclass
class Answer:
    """A question and its answer so far."""

    question: str
    text: str = ""
    tokens: int = 0


@dataclass
class Meter:
    """Values of the status line; times are in seconds."""

    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    model: Model | None = None
    peak: int = 0

    def seconds(self) -> float:
        """Return the duration so far, or in total after the end."""
        return (self.ended or time.monotonic()) - self.started

    def see(self, model: Model) -> None:
        """Record the server's load."""
        self.model = model
        self.peak = max(self.peak, model.total_blocks - model.free_blocks)


def demo(
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 160,
) -> None:
    """Serve the demo model, send it several requests at once and show the KV cache in use."""
    require("demo", "engine", "router")
    try:
        models.gguf_file(models.DEMO)
    except ModelError as error:
        raise fail(str(error)) from None
    with local_server(models.DEMO, *SERVER) as address, failures(address):
        answers, meter = asyncio.run(_run(address, max_tokens))
    for answer in answers:
        out.print(f"\n[bold cyan]{escape(answer.question)}[/]")
        out.out(answer.text.strip())
    tokens = sum(answer.tokens for answer in answers)
    seconds = meter.seconds()
    out.print(
        f"\n{len(answers)} answers at once: {tokens} tokens in {seconds:.1f} s, "
        f"[bold]{tokens / seconds:.1f} tokens/s[/]; at most {meter.peak} KV-cache blocks in use",
        soft_wrap=True,
    )
    for text in meter.model.warnings if meter.model else ():
        err.print(warning(text), soft_wrap=True)
    if "Paris" not in answers[0].text:
        raise fail(f"the answer to {answers[0].question!r} does not say Paris")


async def _run(address: str, max_tokens: int) -> tuple[list[Answer], Meter]:
    """Send all questions at once and show the answers as they stream."""
    answers = [Answer(question) for question in QUESTIONS]
    async with AsyncClient(address) as client:
        meter = Meter()
        watching = keep_running(partial(_watch, client, meter), "watch")
        showing = keep_running(partial(_show, answers, meter), "show")
        try:
            await asyncio.gather(*(_ask(client, answer, max_tokens) for answer in answers))
        finally:
            meter.ended = time.monotonic()
            await end(watching, showing)
    return answers, meter


async def _ask(client: AsyncClient, answer: Answer, max_tokens: int) -> None:
    stream = client.generate(
        [Message("user", answer.question)], max_tokens=max_tokens, temperature=0, token_ids=True
    )
    async for event in stream.events():
        if isinstance(event, Delta):
            answer.text += event.text
            answer.tokens += len(event.token_ids)


async def _watch(client: AsyncClient, meter: Meter) -> None:
    """Update the meter every 0.1 s."""
    while True:
        for model in await client.list_models(timeout=5):
            meter.see(model)
        await asyncio.sleep(0.1)


async def _show(answers: list[Answer], meter: Meter) -> None:
    """Redraw on a terminal; elsewhere print one line per second."""
    if not out.is_terminal:
        while True:
            await asyncio.sleep(1)
            out.print(_status(answers, meter), soft_wrap=True)
    with Live(console=out, auto_refresh=False, transient=True) as live:
        while True:
            live.update(_view(answers, meter), refresh=True)
            await asyncio.sleep(0.1)


def _view(answers: list[Answer], meter: Meter) -> RenderableType:
    """Return the last lines of each answer above the status line."""
    panels = [
        Panel("\n".join(answer.text.strip().splitlines()[-3:])[-240:], title=answer.question)
        for answer in answers
    ]
    return Group(*panels, _status(answers, meter))


def _status(answers: list[Answer], meter: Meter) -> str:
    """Return one line with throughput and KV-cache use."""
    tokens, seconds = sum(answer.tokens for answer in answers), meter.seconds()
    line = f"{tokens} tokens · [bold]{tokens / seconds:.1f} tokens/s[/]"
    if meter.model is not None:
        used = meter.model.total_blocks - meter.model.free_blocks
        line += (
            f" · {meter.model.running} running · KV cache {bar(meter.model.cache_use)} "
            f"({used} of {meter.model.total_blocks} blocks)"
        )
    return line
