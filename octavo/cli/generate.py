"""`octavo generate`: one prompt, answered on stdout."""

import dataclasses
import json
import sys
import time
from typing import Annotated

import typer

from octavo.cli.connection import Server, with_server
from octavo.cli.output import INTERRUPTED, err, failures, out
from octavo.client import Delta, GenerateOptions, Message, Stream
from octavo.client.requests import Prompt


@with_server
def generate(
    server: Server,
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from stdin.')],
    model: Annotated[str | None, typer.Option(help="Model; needed if several are served.")] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="As a user's message, or as plain text to go on from."),
    ] = True,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens per output.")] = 512,
    min_tokens: Annotated[int | None, typer.Option(help="Fewest tokens per output.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", "-t", help="0: greedy.")] = (
        None
    ),
    top_p: Annotated[float | None, typer.Option(help="Nucleus, in (0, 1].")] = None,
    top_k: Annotated[int | None, typer.Option(help="Most likely tokens kept; 0: all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Least share of the likeliest.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1: off.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="0: off.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="0: off.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    n: Annotated[int | None, typer.Option("-n", help="Outputs for the one prompt.")] = None,
    beam_width: Annotated[int | None, typer.Option(help="Beam search; excludes sampling.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; repeatable.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities of so many tokens, with --json.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="Higher is sooner.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds until it is given up.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole result as JSON.")
    ] = False,
) -> None:
    """Generate text for one prompt, streamed to stdout; a summary goes to stderr."""
    text = sys.stdin.read() if prompt == "-" else prompt
    options = GenerateOptions(
        model=model,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        n=n,
        beam_width=beam_width,
        stop=stop or None,
        ignore_eos=ignore_eos or None,
        logprobs=logprobs,
        priority=priority,
        token_ids=as_json or None,
    )
    with failures(server.address), server.client() as client:
        stream = client.generate(_prompt(text, chat, system), timeout=timeout, **options)
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(stream.complete()), ensure_ascii=False))
        else:
            show(stream, several=(n or 1) > 1)


def _prompt(text: str, chat: bool, system: str | None) -> Prompt:
    """Wraps the text in messages unless it is to be taken as it is."""
    if not chat:
        if system is not None:
            raise typer.BadParameter("--system needs --chat")
        return text
    first = [Message("system", system)] if system is not None else []
    return [*first, Message("user", text)]


def show(stream: Stream, *, several: bool = False) -> None:
    """Prints an answer as it comes (several outputs: when all are whole), then a summary."""
    started, first, texts = time.monotonic(), None, dict[int, list[str]]()
    try:
        for event in stream.events():
            if isinstance(event, Delta):
                first = first or time.monotonic()
                texts.setdefault(event.index, []).append(event.text)
                if not several:
                    out.out(event.text, end="")
    except KeyboardInterrupt:
        out.print()
        err.print("[dim]cancelled[/]")
        raise typer.Exit(INTERRUPTED) from None
    if several:
        for index in sorted(texts):
            out.print(f"[dim]── {index} ──[/]")
            out.out("".join(texts[index]))
    else:
        out.print()
    ended = time.monotonic()
    err.print(f"[dim]{summary(stream, started, first or ended, ended)}[/]")


def summary(stream: Stream, started: float, first: float, ended: float) -> str:
    """Counts, time to first token and the rate after it; times in seconds."""
    tokens = sum(end.usage.output_tokens for end in stream.finished)
    reasons = ", ".join(sorted({str(end.reason) for end in stream.finished}))
    prompt = stream.accepted.prompt_tokens if stream.accepted else 0
    after = max(tokens - len(stream.finished), 0) / max(ended - first, 1e-9)
    rate = f" · {after:.1f} tokens/s after it" if tokens > 1 else ""
    return (
        f"{prompt} + {tokens} tokens in {ended - started:.2f} s · "
        f"first after {first - started:.2f} s{rate} · {reasons}"
    )
