"""The flags that several sub-commands of `octavo bench` have."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.bench.settings import DEFAULT_REQUESTS, Shape

ServerFlags = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- SERVER FLAGS",
        help="With --serve, after `--`: flags of `octavo serve`, such as --num-blocks 512.",
        show_default=False,
    ),
]
ModelName = Annotated[str | None, typer.Option(help="Model; default: the first one served.")]
Serve = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Start a server with this model for the measurement."),
]
Requests = Annotated[
    int | None,
    typer.Option(
        "--requests",
        "-r",
        min=1,
        help=f"How many, for each rate or concurrency. Default: {DEFAULT_REQUESTS}; "
        "with --dataset, one for each line.",
    ),
]
LengthsShape = Annotated[
    Shape | None,
    typer.Option(
        help="Distribution of the numbers of tokens; default: fixed. sharegpt: log-normal, "
        "with ShareGPT's means in the PagedAttention paper.",
    ),
]
PromptTokens = Annotated[
    float | None, typer.Option(min=1, help="Mean tokens of a prompt. Default: 128.")
]
PromptSpread = Annotated[
    float | None,
    typer.Option(min=0, help="Standard deviation, in tokens. Default: half of the mean."),
]
OutputTokens = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Mean tokens of an output. Default: 128. With --dataset: most tokens of an "
        "output, for lines without max_tokens.",
    ),
]
OutputSpread = PromptSpread
PrefixTokens = Annotated[
    int, typer.Option(min=0, help="Tokens before each prompt, the same in all: cached once.")
]
DatasetFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="JSON lines instead of random tokens: `prompt` (text) or `messages` (a list of "
        "role and content); optional `max_tokens`.",
    ),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--stop-at-eos",
        help="Go on to the full length. Default: only without --dataset.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Draws prompts, lengths and arrival times.")]
Slo = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME:MS...", help="For goodput: ttft:500 tpot:50 e2e:10000."),
]
Warmup = Annotated[int, typer.Option(min=0, help="Requests sent before, which do not count.")]
Timeout = Annotated[float | None, typer.Option(min=0.001, help="Each request's deadline, seconds.")]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help='Write everything, each request and all settings too. "-": to stdout.',
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the results: .png, .svg or .pdf; needs matplotlib."),
]
