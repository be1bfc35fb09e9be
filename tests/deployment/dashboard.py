"""Reads Grafana's dashboard: its panels, and their queries as Grafana sends them."""

import json
from dataclasses import dataclass

from tests.deployment.composed import DOCKER

FILE = DOCKER / "grafana" / "dashboards" / "octavo.json"


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard.

    Attributes:
        title: Its title.
        place: X, y, width and height in the grid of 24 columns.
        queries: Legend and PromQL of each query; empty for a row.
    """

    title: str
    place: tuple[int, int, int, int]
    queries: list[tuple[str, str]]


def panels(window: str) -> list[Panel]:
    """Return all panels, with every model and engine selected.

    Args:
        window: The value of $__rate_interval.
    """
    values = {"$__rate_interval": window, "$model": ".*", "$engine": ".*"}

    def fill(expression: str) -> str:
        for name, value in values.items():
            expression = expression.replace(name, value)
        return expression

    return [
        Panel(
            panel["title"],
            tuple(panel["gridPos"][name] for name in "xywh"),
            [(t["legendFormat"], fill(t["expr"])) for t in panel.get("targets", [])],
        )
        for panel in json.loads(FILE.read_text())["panels"]
    ]
