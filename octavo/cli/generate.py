"""`octavo generate`: generate text for one prompt."""

import dataclasses
import json
import sys
import time
from typing import Annotated

import typer

from octavo.cli.connection import Server, with_server
from octavo.cli.output import OutputPrinter, err, failures, out
from octavo.cli.parameter_flags import with_options
from octavo.client import Delta, GenerateOptions, Message, Stream
from octavo.client.prompts import Prompt
from octavo.common.shutdown import INTERRUPTED


@with_server
@with_options(defaults={"max_tokens": 512})
def generate(
    server: Server,
    options: GenerateOptions,
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from stdin.')],
    chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="Send the prompt as a user message, or as raw text."),
    ] = True,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Deadline of the request in seconds. Default: none.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, log-probabilities included.")
    ] = False,
) -> None:
    """Generate text for one prompt, streamed to stdout; a summary goes to stderr."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if as_json:
        options["token_ids"] = True
    with failures(server.address), server.client() as client:
        stream = client.generate(_prompt(text, chat, system), timeout=timeout, **options)
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(stream.complete()), ensure_ascii=False))
        else:
            show(stream, several=(options.get("n") or 1) > 1)


def _prompt(text: str, chat: bool, system: str | None) -> Prompt:
    """Return chat messages, or the raw text without `chat`."""
    if not chat:
        if system is not None:
            raise typer.BadParameter("--system needs --chat")
        return text
    first = [Message("system", system)] if system is not None else []
    return [*first, Message("user", text)]


def show(stream: Stream, *, several: bool = False) -> None:
    """Print the answer as it streams, or several outputs at the end; then a summary."""
    started, first, texts = time.monotonic(), None, dict[int, list[str]]()
    shown = OutputPrinter()
    try:
        for event in stream.events():
            if isinstance(event, Delta):
                first = first or time.monotonic()
                texts.setdefault(event.index, []).append(event.text)
                if several:
                    continue
            shown.show(event)
    except KeyboardInterrupt:
        out.print()
        err.print("[dim]cancelled[/]")
        raise typer.Exit(INTERRUPTED) from None
    shown.end()
    if several:
        for index in sorted(texts):
            out.print(f"[dim]── {index} ──[/]")
            out.out("".join(texts[index]))
    else:
        out.print()
    for output in stream.outputs:
        for call in output.tool_calls:
            out.out(f"{call.name}({call.arguments})")
    ended = time.monotonic()
    err.print(f"[dim]{summary(stream, started, first or ended, ended)}[/]")


def summary(stream: Stream, started: float, first: float, ended: float) -> str:
    """Return token counts, time to first token and rate; times are in seconds."""
    tokens = sum(end.usage.output_tokens for end in stream.finished)
    reasons = ", ".join(sorted({str(end.reason) for end in stream.finished}))
    prompt = stream.accepted.prompt_tokens if stream.accepted else 0
    after = max(tokens - len(stream.finished), 0) / max(ended - first, 1e-9)
    rate = f" · {after:.1f} tokens/s after it" if tokens > 1 else ""
    return (
        f"{prompt} + {tokens} tokens in {ended - started:.2f} s · "
        f"first after {first - started:.2f} s{rate} · {reasons}"
    )
