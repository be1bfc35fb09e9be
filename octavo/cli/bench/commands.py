"""The sub-commands of `octavo bench` and their flags."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

import typer

from octavo.cli.bench.flags import (
    DatasetFile,
    IgnoreEos,
    Json,
    LengthsShape,
    ModelName,
    OutputSpread,
    OutputTokens,
    Plot,
    PrefixTokens,
    PromptSpread,
    PromptTokens,
    Requests,
    Seed,
    Serve,
    ServerFlags,
    Slo,
    Timeout,
    Url,
    Warmup,
)
from octavo.cli.bench.settings import (
    DEFAULT_TOKENS,
    Closed,
    Dataset,
    Objectives,
    Open,
    Outputs,
    Plan,
    Shape,
    Synthetic,
    Target,
    Workload,
    choose_lengths,
    openai_base_url,
    parse_objectives,
)
from octavo.cli.bench.several_values import SeveralValues
from octavo.cli.connection import Server, with_server
from octavo.cli.extras import require
from octavo.cli.signature import expand
from octavo.cli.types_in_help import Group, name_types
from octavo.client.address import DEFAULT_ADDRESS

METRICS = """\
[bold]Metrics[/], by the client's clock, over the requests that succeeded:

[bold]TTFT[/], time to first token: from sending a request to its first message with tokens. \
`serve` counts from when the request was due, so a late load generator hides no latency.

[bold]e2e[/]: from the same instant to the end of the stream.

[bold]TPOT[/], time per output token: (e2e - TTFT) / (output tokens - 1), one value per request \
of at least two tokens.

[bold]ITL[/], inter-token latency: the gaps between successive messages with tokens, of all \
requests together. A message with several tokens (the router joins tokens that a slow client has \
not read) ends one gap; the table shows tokens per message if they exceed one.

[bold]normalized[/] latency: e2e / output tokens, one value per request; its mean is what the \
PagedAttention paper plots.

[bold]goodput[/]: requests per second that met every --slo. A one-token request meets any tpot.

Rates are over the time from the first request's sending to the last one's end; percentiles \
interpolate linearly. Failed requests are counted by gRPC status or, with --url, by HTTP status, \
CONNECTION_FAILED, STREAM_BROKEN, STREAM_ERROR (an error within the stream) or NO_USAGE (the \
server counted no tokens). The exit code is 1 if any failed other than by RESOURCE_EXHAUSTED, \
DEADLINE_EXCEEDED or 429 TOO_MANY_REQUESTS, or if none succeeded.
"""

bench = typer.Typer(
    cls=Group,
    help="Measure a server: throughput, latency, or behaviour under a given request rate.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


class Run(NamedTuple):
    """What to measure, and what to do with the results.

    Attributes:
        target: The server and the model; the address is that of the connection options.
        objectives: Maximum latencies for goodput.
        outputs: Files of the results.
    """

    target: Target
    objectives: Objectives | None
    outputs: Outputs


def _run(
    *,
    server_flags: ServerFlags = None,
    url: Url = None,
    model: ModelName = None,
    serve: Serve = None,
    slo: Slo = None,
    warmup: Warmup = 1,
    timeout: Timeout = None,
    json: Json = None,
    plot: Plot = None,
) -> Run:
    """Return the run that the options of `with_run` set."""
    target = Target(DEFAULT_ADDRESS, model, serve, tuple(server_flags or ()), timeout, warmup, url)
    return Run(target, parse_objectives(slo or ()), Outputs(json, plot))


def _workload(
    *,
    requests: Requests = None,
    lengths: LengthsShape = None,
    prompt_tokens: PromptTokens = None,
    prompt_spread: PromptSpread = None,
    output_tokens: OutputTokens = None,
    output_spread: OutputSpread = None,
    prefix_tokens: PrefixTokens = 0,
    dataset: DatasetFile = None,
    ignore_eos: IgnoreEos = None,
    seed: Seed = 0,
) -> Workload:
    """Return the workload that the options of `with_workload` set.

    Raises:
        typer.BadParameter: Two flags exclude each other.
    """
    if dataset is None:
        shapes = choose_lengths(
            lengths or Shape.FIXED, (prompt_tokens, prompt_spread), (output_tokens, output_spread)
        )
        source: Synthetic | Dataset = Synthetic(*shapes, prefix_tokens)
        return Workload(source, requests, seed, ignore_eos is not False)
    synthetic = {
        "--lengths": lengths,
        "--prompt-tokens": prompt_tokens,
        "--prompt-spread": prompt_spread,
        "--output-spread": output_spread,
        "--prefix-tokens": prefix_tokens or None,
    }
    for flag, value in synthetic.items():
        if value is not None:
            raise typer.BadParameter(f"{flag} is for random prompts, not for --dataset")
    return Workload(
        Dataset(dataset, round(output_tokens or DEFAULT_TOKENS)), requests, seed, bool(ignore_eos)
    )


def with_run(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `run` of a command by its options, and `server` by the connection's."""
    options = inspect.signature(_run).parameters.values()
    return with_server(expand(command, "run", options, _run))


def with_workload(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `workload` of a command by its options."""
    return expand(command, "workload", inspect.signature(_workload).parameters.values(), _workload)


@bench.command(cls=SeveralValues, epilog=METRICS)
@name_types
@with_run
@with_workload
def throughput(
    server: Server,
    run: Run,
    workload: Workload,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            "--concurrency",
            "-c",
            min=1,
            metavar="N...",
            help="Requests in flight; several values are measured in turn. Default: all at once.",
        ),
    ] = None,
) -> None:
    """Measure maximum throughput: send all requests at once, or keep a number in flight."""
    plans = [Closed(limit) for limit in concurrency] if concurrency else [Closed(None)]
    _measure("throughput", workload, plans, server, run)


@bench.command(cls=SeveralValues, epilog=METRICS)
@name_types
@with_run
def latency(
    server: Server,
    run: Run,
    requests: Annotated[
        int, typer.Option("--requests", "-r", min=1, help="Number of requests.")
    ] = 10,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each output.")] = 128,
    seed: Seed = 0,
) -> None:
    """Measure the latency of single requests: send one after the other."""
    prompt, output = choose_lengths(
        Shape.FIXED, (float(prompt_tokens), None), (float(output_tokens), None)
    )
    workload = Workload(Synthetic(prompt, output), requests, seed, ignore_eos=True)
    _measure("latency", workload, [Closed(1)], server, run)


@bench.command(cls=SeveralValues, epilog=METRICS)
@name_types
@with_run
@with_workload
def serve(
    server: Server,
    run: Run,
    workload: Workload,
    rate: Annotated[
        list[float],
        typer.Option(
            "--rate",
            metavar="R...",
            help="Mean requests per second; several values are measured in turn.",
        ),
    ],
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the gamma distribution of arrival gaps. 1: a Poisson process; less: "
            "bursts; more: evenly spaced."
        ),
    ] = 1.0,
) -> None:
    """Measure latency under load: send requests at random times, at a given mean rate."""
    for value, flag in (*((r, "--rate") for r in rate), (burstiness, "--burstiness")):
        if not 0 < value < math.inf:
            raise typer.BadParameter(f"{flag} {value:g}: must be above 0, and finite")
    _measure("serve", workload, [Open(each, burstiness) for each in rate], server, run)


def _measure(
    command: str,
    workload: Workload,
    plans: Sequence[Plan],
    server: Server,
    run: Run,
) -> None:
    """Check the flags and the installed extras, then measure.

    Raises:
        typer.BadParameter: Server flags without --serve, gRPC flags with --url, or an output that
            cannot be written.
    """
    target = replace(run.target, address=server.address)
    if target.url is not None:
        _check_url(target.url, server, target)
    if target.server_flags and target.serve is None:
        extra = " ".join(target.server_flags)
        raise typer.BadParameter(f"{extra}: a server's flags need --serve")
    run.outputs.check()
    require(f"bench {command}", "bench")
    if target.serve is not None:
        require(f"bench {command} --serve", "engine", "router")
    from octavo.cli.bench import invocation  # noqa: PLC0415 - needs numpy

    invocation.measure(command, workload, plans, server, target, run.objectives, run.outputs)


def _check_url(url: str, server: Server, target: Target) -> None:
    """Reject a malformed URL, and options that do not apply to one.

    Raises:
        typer.BadParameter: The URL is malformed, or another option excludes it.
    """
    try:
        openai_base_url(url)
    except ValueError as error:
        raise typer.BadParameter(f"--url {error}") from None
    if target.serve is not None:
        raise typer.BadParameter("--url and --serve exclude each other")
    if server.tls is not None:
        raise typer.BadParameter(
            "--tls, --ca, --client-cert, --client-key and --tls-name are for gRPC; --url uses TLS "
            "if it begins with https://"
        )
