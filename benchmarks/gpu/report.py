"""Show the results as tables and a roofline plot."""

import re
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Report = dict[str, Any]


def device_name(device: torch.device) -> str:
    """Return a device's name for tables."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def file_stem(name: str) -> str:
    """Return a device's name for file names."""
    return re.sub(r"\W+", "-", name.lower()).strip("-")


def ceilings(report: Report) -> tuple[float | None, float | None]:
    """Return the device's bytes/s of a copy and flop/s of a matrix product."""
    rows = {row["case"]: row for row in report["parts"].get("device", {}).get("rows", [])}
    copy, product = rows.get("copy"), rows.get("matmul bfloat16")
    return (
        copy and copy["moved"] / copy["seconds"],
        product and product["flops"] / product["seconds"],
    )


def show_tests(report: Report, console: Console) -> None:
    """Print the tests' outcome, file by file."""
    table = Table("tests", title=report["device"])
    for name in ("passed", "failed", "skipped"):
        table.add_column(name, justify="right")
    for file, tests in report["tests"].items():
        name = f"{file}, stopped" if tests["stopped"] else file
        table.add_row(name, *(str(tests[count]) for count in ("passed", "failed", "skipped")))
    console.print(table)


def show_part(report: Report, part: str, console: Console) -> None:
    """Print a part's table and notes; it uses the device's part, which comes first."""
    bandwidth, rate = ceilings(report)
    table = Table(part, title=report["device"])
    for name in ("time", "GB/s", "of copy", "TFLOP/s", "of matmul", "beside", "error"):
        table.add_column(name, justify="right")
    outcome = report["parts"][part]
    for row in outcome["rows"]:
        table.add_row(row["case"], *_cells(row, None if part == "swap" else bandwidth, rate))
    if outcome["failure"]:
        table.add_row(f"[red]{escape(outcome['failure'].splitlines()[-1])}[/red]")
    console.print(table)
    for note in sorted({note for row in outcome["rows"] for note in row["notes"]}):
        console.print(f"[dim]{note}[/dim]")


def show_key(console: Console) -> None:
    """Print what the columns mean."""
    console.print(
        "GB/s counts each byte that must move once; `of copy` and `of matmul` are shares of what"
        " this device's own copies and products reach; `beside` is others' time over ours."
    )


def _cells(row: dict[str, Any], bandwidth: float | None, rate: float | None) -> list[str]:
    seconds = row["seconds"]
    moved, flops = row["moved"] / seconds, row["flops"] / seconds
    peers = [f"{name} {other / seconds:.2f}x" for name, other in row["peers"].items()]
    return [
        f"{seconds * 1e6:,.0f} us",
        f"{moved / 1e9:,.0f}" if moved else "",
        f"{moved / bandwidth:.0%}" if moved and bandwidth else "",
        f"{flops / 1e12:,.0f}" if flops else "",
        f"{flops / rate:.0%}" if flops and rate else "",
        "\n".join(peers),
        "" if row["error"] is None else f"{row['error']:.1e}",
    ]


def plot(report: Report, path: Path) -> None:
    """Draw attention's cases under the device's roofline."""
    import matplotlib as mpl  # noqa: PLC0415 - only the benchmarks need it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - only after choosing its backend

    bandwidth, rate = ceilings(report)
    if not bandwidth or not rate:
        return
    figure, axes = plt.subplots(figsize=(8, 5))
    intensities = [2.0**power for power in range(-2, 15)]
    axes.plot(intensities, [min(rate, x * bandwidth) / 1e12 for x in intensities], color="black")
    for part in ("decode", "prefill"):
        for row in report["parts"].get(part, {}).get("rows", []):
            x, y = row["flops"] / row["moved"], row["flops"] / row["seconds"] / 1e12
            axes.plot(x, y, "o")
            axes.annotate(row["case"], (x, y), fontsize=6)
    axes.set(xscale="log", yscale="log", xlabel="flop per byte of K and V", ylabel="TFLOP/s")
    axes.set_title(f"{report['device']}: attention under the roofline")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
