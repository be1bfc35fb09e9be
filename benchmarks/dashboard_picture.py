"""Draws Grafana's dashboard over a real run: `python -m benchmarks.dashboard_picture FILE.png`.

A router and two engines of a tiny random model serve three tenants under a load that comes and
goes; a real Prometheus scrapes them. The panels, their places, queries, units and thresholds are
those of the dashboard's JSON; what Prometheus answers is drawn by matplotlib, not by Grafana.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import random
import secrets
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib import dates, ticker
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks import dashboard, fleet
from benchmarks.dashboard import Panel
from benchmarks.prometheus import Prometheus
from octavo import AsyncClient, Error
from octavo.common.ports import free_port
from octavo.router.tenants.tenant import hash_key

STEP = 2
"""Seconds between scrapes, and between the points of a line."""
WINDOW = f"{4 * STEP}s"
"""As Grafana's $__rate_interval: four scrapes."""
CALM, BUSY, RUDE = "research", "support", "batch"
OUTPUT_TOKENS = (64, 384)
SMALL: dict[str, Any] = {"num_blocks": 320, "swap_space": 0.004, "max_num_seqs": 24}
"""An engine that the load can fill."""
INCHES = (17.0, 0.36)
"""The picture's width, and a row's height."""
INK, PAPER, FRAME = "#d8d9da", "#111217", "#181b1f"
COLOURS = ["#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#96d98d"]
NAMED = {"green": COLOURS[0], "orange": COLOURS[3], "red": COLOURS[4], "blue": COLOURS[2]}


async def load(address: str, keys: dict[str, str], seconds: float) -> None:
    """Sends three tenants' requests: steadily, in a wave, and all at once in between."""
    end = time.monotonic() + seconds
    chance = random.Random(1)
    shared = "You are a helpful assistant of a small company. " * 4

    async def ask(client: AsyncClient, prompt: str) -> None:
        tokens = chance.randint(*OUTPUT_TOKENS)
        timeout = chance.choice([None, None, 20.0])
        with contextlib.suppress(Error):  # refusals are part of the picture
            await client.generate(
                prompt, max_tokens=tokens, ignore_eos=True, timeout=timeout
            ).text()

    async def come(tenant: str, rate: Callable[[float], float], burst: int = 1) -> None:
        client = AsyncClient(address, api_key=keys[tenant])
        async with client, asyncio.TaskGroup() as sent:
            while (left := end - time.monotonic()) > 0:
                for _ in range(burst):
                    prompt = f"{shared}{tenant} {chance.random()} " * chance.randint(1, 2)
                    sent.create_task(ask(client, prompt))
                await asyncio.sleep(chance.expovariate(rate(1 - left / seconds)))

    await asyncio.gather(
        come(CALM, lambda _: 1.0),
        come(BUSY, lambda passed: 1.0 + 6.0 * math.sin(math.pi * passed) ** 4),
        come(RUDE, lambda _: 0.04, burst=40),
    )


async def run(file: Path, seconds: float) -> None:
    """Serves, scrapes, and draws at the end."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model = fleet.make_model(directory / "model")
        keys = {name: secrets.token_urlsafe() for name in (CALM, BUSY, RUDE)}
        tenants = directory / "tenants.toml"
        limits = {CALM: "weight = 2.0", BUSY: "", RUDE: "max_concurrency = 32"}
        tables = (f'[{n}]\nkeys = ["{hash_key(k)}"]\n{limits[n]}' for n, k in keys.items())
        tenants.write_text("\n".join(tables))
        ports = [free_port() for _ in range(3)]
        engines = [
            fleet.engine(
                model, metrics_port=port, num_blocks=320, swap_space=0.004, max_num_seqs=24
            )
            for port in ports[1:]
        ]
        addresses = [engine.address for engine in engines]
        router = fleet.router(addresses, metrics_port=ports[0], tenants=tenants, max_queue_size=48)
        nodes = [*engines, router]
        try:
            for node in nodes:
                await node.start()
            targets = {
                "octavo-router": [f"127.0.0.1:{ports[0]}"],
                "octavo-engine": [f"127.0.0.1:{port}" for port in ports[1:]],
            }
            prometheus = await asyncio.to_thread(
                Prometheus(directory / "prometheus", targets, STEP).__enter__
            )
            try:
                await asyncio.sleep(3 * STEP)
                start = time.time()
                await load(router.address, keys, seconds)
                await asyncio.to_thread(draw, prometheus, file, start, start + seconds)
            finally:
                prometheus.__exit__()
        finally:
            for node in nodes:
                await node.close()


def draw(prometheus: Prometheus, file: Path, start: float, end: float) -> None:
    """Draws every panel where the dashboard has it."""
    panels = dashboard.panels(WINDOW)
    columns = 24
    rows = max(y + height for _, y, _, height in (panel.place for panel in panels))
    width, row = INCHES
    plt.rcParams.update(
        {"font.size": 9, "text.color": INK, "axes.prop_cycle": plt.cycler(color=COLOURS)}
    )
    figure = plt.figure(figsize=(width, rows * row), facecolor=PAPER)
    for panel in panels:
        x, y, wide, high = panel.place
        left, bottom = x / columns, 1 - (y + high) / rows
        if panel.kind == "row":
            figure.text(0.004, bottom + 0.3 / rows, panel.title, size=14, weight="bold")
            continue
        series = [
            (dashboard.label(legend, labels), points)
            for legend, query in panel.queries
            for labels, points in prometheus.query_range(query, start, end, STEP)
        ]
        gap = 0.12
        box = (
            left + gap / columns,
            bottom + gap / rows,
            (wide - 2 * gap) / columns,
            (high - 2 * gap) / rows,
        )
        frame = figure.add_axes(box, facecolor=FRAME)
        frame.set(xticks=[], yticks=[])
        for spine in frame.spines.values():
            spine.set_color("#2c3235")
        (_stat if panel.kind == "stat" else _chart)(frame, panel, series)
    figure.savefig(file, dpi=90, facecolor=PAPER)


Series = list[tuple[str, list[tuple[float, float]]]]


def _stat(frame: Axes, panel: Panel, series: Series) -> None:
    """A large number before its past."""
    frame.text(0.04, 0.86, panel.title, transform=frame.transAxes, va="center", size=10)
    points = [(t, v) for _, found in series for t, v in found if not math.isnan(v)]
    if not points:
        frame.text(0.5, 0.45, "No data", transform=frame.transAxes, ha="center", size=14)
        return
    value, unit = points[-1][1], panel.defaults["unit"]
    steps = panel.defaults["thresholds"]["steps"]
    colour = [s["color"] for s in steps if s["value"] is None or value >= s["value"]][-1]
    past = frame.inset_axes((0.0, 0.0, 1.0, 0.4))
    past.axis("off")
    past.fill_between(*_columns(points), color=NAMED[colour], alpha=0.25, linewidth=0)
    past.set_ylim(0, max(v for _, v in points) * 1.1 or 1)
    past.margins(x=0)
    place: dict[str, Any] = {"transform": frame.transAxes, "ha": "center", "va": "center"}
    frame.text(0.5, 0.48, _shown(value, unit), size=18, color=NAMED[colour], **place)


def _chart(frame: Axes, panel: Panel, series: Series) -> None:
    """Lines over time, their names below."""
    frame.text(0.02, 0.94, panel.title, transform=frame.transAxes, va="center", size=10)
    names = {name for name, _ in series}
    columns = 4 if max(map(len, names), default=0) < 14 else 2
    bottom = 0.18 + 0.06 * math.ceil(len(names) / columns)
    chart = frame.inset_axes((0.12, bottom, 0.85, 0.86 - bottom), facecolor=FRAME)
    chart.tick_params(colors=INK, labelsize=7, length=0)
    chart.grid(color="#2c3235", linewidth=0.6)
    for spine in chart.spines.values():
        spine.set_visible(False)
    floor: dict[float, float] = {}
    drawn = [(n, [p for p in points if not math.isnan(p[1])]) for n, points in series]
    stacked = panel.defaults["custom"]["stacking"]["mode"] == "normal"
    for name, points in drawn:
        below = [floor.get(t, 0.0) for t, _ in points] if stacked else [0.0] * len(points)
        times, values = _columns([(t, v + b) for (t, v), b in zip(points, below, strict=True)])
        (line,) = chart.plot(*_broken(times, values), linewidth=1.2, label=name or panel.title)
        alpha = 0.35 if stacked else 0.07
        chart.fill_between(times, below, values, color=line.get_color(), alpha=alpha, linewidth=0)
        floor |= {t: v + b for (t, v), b in zip(points, below, strict=True)}
    chart.set_ylim(0, panel.defaults.get("max"))
    chart.margins(x=0)
    chart.xaxis.set_major_locator(ticker.LinearLocator(4))
    chart.xaxis.set_major_formatter(dates.DateFormatter("%H:%M:%S"))
    ends = chart.xaxis.get_ticklabels()
    ends[0].set_horizontalalignment("left")
    ends[-1].set_horizontalalignment("right")
    unit = panel.defaults["unit"].partition(":")[0]  # a name of our own is too long here
    chart.yaxis.set_major_formatter(lambda value, _: _shown(value, unit))
    if not any(points for _, points in drawn):
        frame.text(0.5, 0.55, "No data", transform=frame.transAxes, ha="center", size=14)
    handles, labels = chart.get_legend_handles_labels()
    order = dict(zip(labels, handles, strict=True))
    frame.legend(
        order.values(),
        order.keys(),
        loc="lower left",
        ncols=columns,
        fontsize=7,
        frameon=False,
        labelcolor=INK,
        handlelength=1,
        columnspacing=1,
        borderpad=0.2,
    )


def _broken(times: list[Any], values: list[float]) -> tuple[list[Any], list[float]]:
    """A line that has a gap where scrapes are missing."""
    pairs = list(zip(times, values, strict=True))
    broken = pairs[:1]
    for (before, _), (moment, value) in itertools.pairwise(pairs):
        if (moment - before).total_seconds() > 3 * STEP:
            broken.append((before, math.nan))
        broken.append((moment, value))
    return [t for t, _ in broken], [v for _, v in broken]


def _columns(points: list[tuple[float, float]]) -> tuple[list[Any], list[float]]:
    """Times as matplotlib has them, and values."""
    return [datetime.fromtimestamp(t, UTC) for t, _ in points], [v for _, v in points]


def _shown(value: float, unit: str) -> str:
    """A value with its unit, as short as Grafana would."""
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
    if unit == "bytes":
        return f"{value / (1 << 20):.4g} MiB"
    if abs(value) >= 1000:
        value, thousand = value / 1000, "K"
    else:
        thousand = ""
    suffix = {"reqps": " req/s", "ops": "/s", "short": "", "suffix": ""}.get(
        unit, unit.removeprefix("suffix:")
    )
    return f"{value:.3g}{thousand}{suffix}"


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", type=Path, help="where the picture goes")
    parser.add_argument("--seconds", type=float, default=240.0, help="how long the load lasts")
    arguments = parser.parse_args()
    asyncio.run(run(arguments.file, arguments.seconds))


if __name__ == "__main__":
    main()
