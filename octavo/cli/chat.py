"""`octavo chat`: a conversation."""

import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer
from rich.markup import escape

from octavo.cli.connection import Server, with_server
from octavo.cli.output import OutputPrinter, err, failures, out, report
from octavo.cli.parameter_flags import with_options
from octavo.client import Client, Delta, Error, GenerateOptions, Message, Model

HELP = """[bold]/help[/]           list the commands
[bold]/reset[/]          start a new conversation
[bold]/system TEXT[/]    set the system message and start a new conversation; without TEXT: print it
[bold]/quit[/]           leave (so does ctrl-D); ctrl-C stops an answer"""

FALLBACKS = {"temperature": 0.7, "top_p": 0.95}
"""Sampling parameters if neither the user nor the model sets them."""
CHECK_SECONDS = 5.0
"""Seconds to wait for the server's first answer."""


class Conversation:
    """The messages so far and the system message."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.messages: list[Message] = []

    def prompt(self) -> list[Message]:
        """Return the messages to send to the model."""
        first = [Message("system", self.system)] if self.system else []
        return [*first, *self.messages]


@with_server
@with_options(
    ("model", "max_tokens", "max_reasoning_tokens", "temperature", "top_p", "seed", "json_schema"),
    defaults={"max_tokens": 1024},
    fallbacks=FALLBACKS,
)
def chat(
    server: Server,
    options: GenerateOptions,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
) -> None:
    """Chat with a model. /help lists the commands."""
    conversation = Conversation(system)
    with server.client() as client:
        with failures(server.address):
            options = with_fallbacks(options, _check(client))
        if sys.stdin.isatty():
            import readline  # noqa: F401, PLC0415 - gives input() history and editing

            err.print("[dim]/help lists the commands; ctrl-D leaves[/]")
        while (line := _read()) is not None:
            if line.startswith("/"):
                if not _command(line, conversation):
                    break
            elif line:
                conversation.messages.append(Message("user", line))
                _answer(client, conversation, options)


def _check(client: Client) -> Sequence[Model]:
    """Check that the server answers; return its models, and warn if there are none yet.

    Raises:
        Error: The server does not answer, or rejects the API key.
    """
    models = client.list_models(timeout=CHECK_SECONDS)
    if not models:
        err.print("[yellow]no model is served yet[/]: an answer waits for an engine")
    return models


def with_fallbacks(options: GenerateOptions, models: Sequence[Model]) -> GenerateOptions:
    """Return options with this command's sampling defaults, unless the model has its own."""
    chosen = [
        model for model in models if options.get("model") in (None, model.name, *model.aliases)
    ]
    if any(model.default_sampling for model in chosen):
        return options
    return cast("GenerateOptions", {**FALLBACKS, **options})


def _read() -> str | None:
    """Return the next line; None at the end of input. Ctrl-C discards the line."""
    while True:
        try:
            return input("› " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            err.print("\n[dim]ctrl-D or /quit leaves[/]")


def _command(line: str, conversation: Conversation) -> bool:
    """Execute a /command; return False if it ends the conversation."""
    name, _, rest = line.partition(" ")
    match name:
        case "/quit" | "/exit":
            return False
        case "/help":
            err.print(HELP)
        case "/reset":
            conversation.messages.clear()
            err.print("[dim]conversation cleared[/]")
        case "/system" if rest.strip():
            conversation.system = rest.strip()
            conversation.messages.clear()
            err.print("[dim]system message set; conversation cleared[/]")
        case "/system":
            system = conversation.system or "no system message; the model's default applies"
            err.print(f"[dim]{escape(system)}[/]")
        case _:
            err.print(f"[yellow]unknown command {escape(name)}[/]; /help lists the commands")
    return True


def _answer(client: Client, conversation: Conversation, options: GenerateOptions) -> None:
    """Stream the answer and add it to the chat; on failure, remove the question."""
    parts: list[Delta] = []
    shown = OutputPrinter()
    try:
        with client.generate(conversation.prompt(), **options) as stream:
            for event in stream.events():
                shown.show(event)
                if isinstance(event, Delta):
                    parts.append(event)
        shown.end()
    except KeyboardInterrupt:
        err.print(" [dim]cancelled[/]", end="")
    except Error as error:
        conversation.messages.pop()
        if parts:
            out.print()
        report(error, client.address)
        return
    out.print()
    if parts:
        text = "".join(delta.text for delta in parts)
        reasoning = "".join(delta.reasoning for delta in parts)
        conversation.messages.append(Message("assistant", text, reasoning=reasoning))
    else:
        conversation.messages.pop()
