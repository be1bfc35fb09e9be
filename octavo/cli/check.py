"""`octavo check`: report from a model's config whether and how it can be served."""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ByteSize
from rich.markup import escape
from rich.table import Table

from octavo.cli.extras import require
from octavo.cli.options import Flags, load, settings_options
from octavo.cli.output import fail, out
from octavo.common import logging
from octavo.common.models.errors import ModelError
from octavo.engine.settings import EngineSettings

if TYPE_CHECKING:
    from octavo.engine.startup.embedder_report import EmbedderReport
    from octavo.engine.startup.model_report import GroupReport, ModelReport

SHOWN = frozenset(
    {
        *("model", "device", "dtype", "quantization", "kv_cache_dtype", "max_model_len"),
        *("block_size", "cache_memory", "num_blocks", "gpu_memory_utilization", "swap_space"),
        *("max_num_seqs", "max_num_batched_tokens", "config"),
        "pooling",
    }
)
"""Engine settings that affect the model's memory."""
HIDDEN = EngineSettings.model_fields.keys() - SHOWN
UNITS = {"": 1 << 30} | {
    unit + end: base**power
    for power, unit in enumerate("KMGT", 1)
    for end, base in (("", 1 << 10), ("iB", 1 << 10), ("B", 1000))
}


@settings_options(EngineSettings, hidden=HIDDEN, positional="model")
def check(
    flags: Flags,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for serving the model, such as 16GiB. Default: this machine's free memory."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Report whether and how a model can be served, and what fits into memory; exit code 0 or 1.

    Only the model's config is read or downloaded. The weights' files and the logits are checked
    when the model is served. MODEL is a Hub name, a local directory, a GGUF file or `demo`.
    """
    require("check", "engine")
    settings = load(EngineSettings, flags)
    size = None if memory is None else parse_bytes(memory)
    logging.configure(settings.log_format, "warning")
    from octavo.engine.startup.capacity import StartupError  # noqa: PLC0415 - torch takes seconds
    from octavo.engine.startup.model_report import report  # noqa: PLC0415

    try:
        model_report = report(settings, size)
    except (ModelError, StartupError, OSError) as error:
        if not as_json:
            raise fail(str(error)) from None
        result = {"model": settings.model, "served": False, "reason": str(error)}
        typer.echo(json.dumps(result, indent=2))
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"served": True} | dataclasses.asdict(model_report), indent=2))
    else:
        _show(model_report)


def parse_bytes(text: str) -> int:
    """Parse a size in bytes; a number without a unit is in GiB.

    Raises:
        typer.BadParameter: The text is not a size.
    """
    sizes = {unit.lower(): size for unit, size in UNITS.items()}
    match = re.fullmatch(r"(\d+\.?\d*)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in sizes:
        raise typer.BadParameter(
            f"--memory: {text!r} is not a size: give a number and a unit, such as 16GiB"
        )
    return int(float(match[1]) * sizes[match[2]])


def _show(served: "ModelReport | EmbedderReport") -> None:
    from octavo.engine.startup.embedder_report import EmbedderReport  # noqa: PLC0415 - as above

    out.print(f"[bold green]served[/]: {escape(served.model)} ({served.architecture})")
    facts = Table.grid(padding=(0, 2))
    if isinstance(served, EmbedderReport):
        others, groups = _embedder_facts(served), None
    else:
        others, groups = _facts(served), served.groups
    for name, value in (_common_facts(served) | others).items():
        facts.add_row(f"[dim]{name}[/]", value)
    out.print(facts)
    if groups is not None:
        _show_groups(groups)


def _show_groups(reports: "Sequence[GroupReport]") -> None:
    groups = Table("layers", "keeps", "a token", "a sequence", box=None, padding=(0, 2, 0, 0))
    for group in merged(reports):
        token = "" if group.token_bytes is None else _size(group.token_bytes)
        groups.add_row(str(group.layers), describe(group), token, _size(group.sequence_bytes))
    out.print(groups)


def _common_facts(served: "ModelReport | EmbedderReport") -> dict[str, str]:
    """Return the facts that all reports have, by name."""
    kinds = served.weights_by_quantization.items()
    others = [f"{name} {_size(size)}" for name, size in kinds if name != served.quantization]
    quantized = "" if served.quantization == "none" else f", {served.quantization}"
    return {
        "runs on": f"{served.device}, {served.dtype}{quantized}",
        "weights": f"{_size(served.weights)} for {served.parameters:,} parameters"
        + (f"; with --quantization {', '.join(others)}" if others else ""),
        "memory": f"{_size(served.memory)} free",
    }


def _embedder_facts(served: "EmbedderReport") -> dict[str, str]:
    """Return the other facts of a report of a model that embeds or classifies, by name."""
    made = f"embeddings of {served.dimensions} dimensions, pooled by {served.pooling}"
    if served.labels:
        made = f"scores of {', '.join(map(escape, served.labels))}"
    return {
        "loading": _size(served.loading),
        "makes": made,
        "longest text": f"{served.max_model_len:,} tokens",
    }


def _facts(served: "ModelReport") -> dict[str, str]:
    """Return the other facts of a report of a model that generates text, by name."""
    tokens = "tokens of any number" if served.tokens is None else f"{served.tokens:,} tokens"
    return {
        "reads": "text and images" if served.images else "text",
        "KV cache": f"{_size(served.cache)}, {served.cache_dtype}: {tokens}, or"
        f" {served.sequences:,} sequences of {served.max_model_len:,}",
        "context": f"{served.max_model_len:,} of the model's {served.context:,} tokens",
    }


def merged(groups: Sequence["GroupReport"]) -> "list[GroupReport]":
    """Return the layer groups, merging those that keep the same."""
    alike: dict[tuple[str, int | None], list[GroupReport]] = {}
    for group in groups:
        alike.setdefault((group.kind, group.reach), []).append(group)
    return [
        dataclasses.replace(
            alike_groups[0],
            layers=sum(group.layers for group in alike_groups),
            token_bytes=sum(group.token_bytes or 0 for group in alike_groups) or None,
            sequence_bytes=sum(group.sequence_bytes for group in alike_groups),
        )
        for alike_groups in alike.values()
    ]


def describe(group: "GroupReport") -> str:
    """Describe what a layer group keeps."""
    if group.kind == "state":
        return "a state"
    if group.kind == "attention":
        return "K and V of all tokens"
    if group.kind == "latent":
        return "latents of all tokens"
    reach = "a window" if group.kind == "window" else "a chunk"
    return f"K and V of {reach} of {group.reach:,} tokens"


def _size(size: int) -> str:
    """Format a number of bytes with a unit."""
    return ByteSize(size).human_readable(separator=" ")
