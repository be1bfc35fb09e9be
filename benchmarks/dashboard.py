"""Grafana's dashboard, read: its panels, and their queries as Grafana would send them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "docker" / "grafana" / "dashboards" / "octavo.json"


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard.

    Attributes:
        title: Above it.
        kind: "row", "stat" or "timeseries".
        place: x, y, width and height in the grid of 24 columns.
        queries: Legend and PromQL; none on a row.
        defaults: Unit, limits, thresholds, as Grafana has them.
    """

    title: str
    kind: str
    place: tuple[int, int, int, int]
    queries: list[tuple[str, str]]
    defaults: dict[str, Any]


def panels(window: str) -> list[Panel]:
    """Returns all panels, with every model and engine chosen.

    Args:
        window: What Grafana would put for $__rate_interval.
    """
    return [
        Panel(
            panel["title"],
            panel["type"],
            tuple(panel["gridPos"][name] for name in "xywh"),  # type: ignore[arg-type]
            [(_legend(t), _filled(t["expr"], window)) for t in panel.get("targets", [])],
            panel.get("fieldConfig", {}).get("defaults", {}),
        )
        for panel in json.loads(FILE.read_text())["panels"]
    ]


def label(legend: str, labels: dict[str, str]) -> str:
    """Returns a legend with a series' labels filled in."""
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), legend)


def _legend(target: dict[str, Any]) -> str:
    legend: str = target["legendFormat"]
    return "" if legend == "__auto" else legend


def _filled(expression: str, window: str) -> str:
    for name, value in (("$__rate_interval", window), ("$model", ".*"), ("$engine", ".*")):
        expression = expression.replace(name, value)
    return expression
