"""Flags that several sub-commands of `octavo bench` share."""

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
ModelName = Annotated[str | None, typer.Option(help="Model name. Default: the first model served.")]
Serve = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Start a server with this model and measure it."),
]
Url = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Measure a server with OpenAI's API over HTTP, such as vLLM or Octavo's --http-port: "
        "http://HOST:PORT, with the API's path if that is not /v1. --api-key is sent to it. "
        "Default: Octavo over gRPC, at --address.",
        rich_help_panel="Connection",
        show_default=False,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        "--requests",
        "-r",
        min=1,
        help=f"Number of requests per rate or concurrency. Default: {DEFAULT_REQUESTS}; "
        "with --dataset, one per line.",
    ),
]
LengthsShape = Annotated[
    Shape | None,
    typer.Option(
        help="Distribution of prompt and output lengths. Default: fixed. sharegpt, alpaca: "
        "log-normal, with the data set's means from the PagedAttention paper.",
    ),
]
PromptTokens = Annotated[
    float | None, typer.Option(min=1, help="Mean prompt length in tokens. Default: 128.")
]
PromptSpread = Annotated[
    float | None,
    typer.Option(min=0, help="Standard deviation in tokens. Default: half the mean."),
]
OutputTokens = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Mean output length in tokens. Default: 128. With --dataset: maximum tokens of an "
        "output, for lines without max_tokens.",
    ),
]
OutputSpread = PromptSpread
PrefixTokens = Annotated[
    int, typer.Option(min=0, help="Length in tokens of a prefix that all prompts share.")
]
DatasetFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="JSON-lines file of prompts; each line has `prompt` (text) or `messages` (a list "
        "of role and content), and optionally `max_tokens`. Default: random tokens.",
    ),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--stop-at-eos",
        help="Generate the full output length. Default: on, off with --dataset.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of prompts, lengths and arrival times.")]
Slo = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:MS...",
        help="Maximum latencies in milliseconds for goodput: ttft:500 tpot:50 e2e:10000.",
    ),
]
Warmup = Annotated[int, typer.Option(min=0, help="Requests sent before each run, not measured.")]
Timeout = Annotated[float | None, typer.Option(min=0.001, help="Deadline per request in seconds.")]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help='Write all results, settings and requests to a JSON file; "-" is stdout.',
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Plot the results to a .png, .svg or .pdf file; needs matplotlib."
    ),
]
