"""`octavo demo`: starts a server with the demo model and asks it a few things at once."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel

from octavo.cli.output import bar, err, fail, failures, out
from octavo.client import AsyncClient, Delta, Message, Model
from octavo.common import models

QUESTIONS = (
    "What is the capital of France?",
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about a book whose pages are never in order.",
    "How do I boil an egg? List the steps.",
)
START_SECONDS = 180.0
TAIL_LINES = 25
"""How much of the server's log is shown when it does not start."""


@dataclass
class Answer:
    """A question and what came back so far."""

    question: str
    text: str = ""
    tokens: int = 0


@dataclass
class Meter:
    """What the display shows besides text. Times are in seconds."""

    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    model: Model | None = None
    peak: int = 0

    def seconds(self) -> float:
        """How long it has run, or ran."""
        return (self.ended or time.monotonic()) - self.started

    def see(self, model: Model) -> None:
        """Takes in the server's load."""
        self.model = model
        self.peak = max(self.peak, model.total_blocks - model.free_blocks)


def demo(
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 160,
) -> None:
    """Serve the demo model, ask it several things at once and show it at work."""
    try:
        models.resolve(models.DEMO)
    except models.ModelError as error:
        raise fail(str(error)) from None
    address = f"127.0.0.1:{_free_port()}"
    with _server(address) as log, failures(address):
        answers, meter = asyncio.run(_run(address, max_tokens, log))
    for answer in answers:
        out.print(f"\n[bold cyan]{escape(answer.question)}[/]")
        out.out(answer.text.strip())
    tokens = sum(answer.tokens for answer in answers)
    seconds = meter.seconds()
    out.print(
        f"\n{len(answers)} answers at once: {tokens} tokens in {seconds:.1f} s, "
        f"[bold]{tokens / seconds:.1f} tokens/s[/]; at most {meter.peak} KV-cache blocks in use"
    )
    if "Paris" not in answers[0].text:
        raise fail(f"the answer to {answers[0].question!r} does not say Paris")


async def _run(address: str, max_tokens: int, log: "_Log") -> tuple[list[Answer], Meter]:
    """Asks everything at once and shows the answers growing."""
    answers = [Answer(question) for question in QUESTIONS]
    async with AsyncClient(address) as client:
        await _wait_for(client, log)
        meter = Meter()
        watching = asyncio.create_task(_watch(client, meter))
        showing = asyncio.create_task(_show(answers, meter))
        try:
            await asyncio.gather(*(_ask(client, answer, max_tokens) for answer in answers))
        finally:
            meter.ended = time.monotonic()
            for task in (watching, showing):
                task.cancel()
            await asyncio.gather(watching, showing, return_exceptions=True)
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
    """Keeps the meter up to date."""
    while True:
        for model in await client.list_models(timeout=5):
            meter.see(model)
        await asyncio.sleep(0.1)


async def _show(answers: list[Answer], meter: Meter) -> None:
    """Redraws on a terminal; elsewhere prints a line a second."""
    if not out.is_terminal:
        while True:
            await asyncio.sleep(1)
            out.print(_status(answers, meter))
    with Live(console=out, auto_refresh=False, transient=True) as live:
        while True:
            live.update(_view(answers, meter), refresh=True)
            await asyncio.sleep(0.1)


def _view(answers: list[Answer], meter: Meter) -> RenderableType:
    """The end of each answer, over the status line."""
    panels = [
        Panel("\n".join(answer.text.strip().splitlines()[-3:])[-240:], title=answer.question)
        for answer in answers
    ]
    return Group(*panels, _status(answers, meter))


def _status(answers: list[Answer], meter: Meter) -> str:
    """Throughput and KV-cache use in a line."""
    tokens, seconds = sum(answer.tokens for answer in answers), meter.seconds()
    line = f"{tokens} tokens · [bold]{tokens / seconds:.1f} tokens/s[/]"
    if meter.model is not None:
        used = meter.model.total_blocks - meter.model.free_blocks
        line += (
            f" · {meter.model.running} running · KV cache {bar(meter.model.cache_use)} "
            f"({used} of {meter.model.total_blocks} blocks)"
        )
    return line


@dataclass
class _Log:
    """The server's process and where it logs."""

    process: subprocess.Popen[bytes]
    path: Path

    def tail(self) -> str:
        """The log's last lines."""
        return "\n".join(self.path.read_text(errors="replace").splitlines()[-TAIL_LINES:])


@contextlib.contextmanager
def _server(address: str) -> Iterator[_Log]:
    """Runs `octavo serve` at `address`, and stops it at the end."""
    command = [sys.executable, "-m", "octavo", "serve", "--model", models.DEMO]
    port = address.rpartition(":")[2]
    with tempfile.TemporaryDirectory(prefix="octavo-demo-") as directory:
        path = Path(directory) / "server.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [*command, "--port", port, "--metrics-port", "0"], stdout=log, stderr=log
            )
        try:
            yield _Log(process, path)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _wait_for(client: AsyncClient, log: _Log) -> None:
    """Waits until the server is ready; shows its log if it never is."""
    started = time.monotonic()
    with err.status("Starting octavo serve --model demo…"):
        while time.monotonic() - started < START_SECONDS:
            if log.process.poll() is not None:
                raise fail(f"the server ended with code {log.process.returncode}:\n{log.tail()}")
            if await client.is_serving(timeout=1):
                out.print(f"[green]ready[/] after {time.monotonic() - started:.1f} s")
                return
            await asyncio.sleep(0.1)
    raise fail(f"the server was not ready within {START_SECONDS:.0f} s:\n{log.tail()}")


def _free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
