"""Writes the dashboard that Grafana is provisioned with: a line here is a query there.

    python tools/dashboard.py

Every panel stands under the operator's question that it answers.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "docker" / "grafana" / "dashboards" / "octavo.json"
COLUMNS = 24
"""Of Grafana's grid."""
SOURCE = {"type": "prometheus", "uid": "${source}"}

ROUTER = 'model=~"$model"'
ENGINE = 'instance=~"$engine"'


@dataclass(frozen=True)
class Panel:
    """One chart or number.

    Attributes:
        title: What it shows.
        queries: PromQL by legend; a legend may have {{label}}s.
        unit: Grafana's name of it.
        help: What to make of it.
        kind: "timeseries" or "stat".
        width: In columns.
        stacked: Whether the series are parts of a whole.
        thresholds: Where a number becomes orange, and where red.
        maximum: The axis' end; None: wherever the series end.
    """

    title: str
    queries: dict[str, str]
    unit: str = "short"
    help: str = ""
    kind: str = "timeseries"
    width: int = 6
    stacked: bool = False
    thresholds: tuple[float, float] | None = None
    maximum: float | None = None

    @property
    def height(self) -> int:
        """In rows of the grid."""
        return 4 if self.kind == "stat" else 8


@dataclass(frozen=True)
class Section:
    """Panels that answer one question."""

    question: str
    panels: list[Panel] = field(default_factory=list)


def stat(title: str, query: str, unit: str = "short", **more: Any) -> Panel:  # noqa: ANN401
    """A number as it is now, with its past behind it."""
    return Panel(title, {"": query}, unit, kind="stat", width=3, **more)


def quantiles(metric: str, labels: str, by: str = "") -> dict[str, str]:
    """Queries for half, 95% and 99% of a histogram's observations."""
    rate = f"sum by (le{by}) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return {f"p{q}": f"histogram_quantile(0.{q}, {rate})" for q in (50, 95, 99)}


def rate(metric: str, labels: str, by: str = "") -> str:
    """A counter's increase per second, summed over all but the label `by`."""
    total = f"rate({metric}{{{labels}}}[$__rate_interval])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def states(metric: str, *names: str) -> dict[str, str]:
    """A gauge of engines by its label `state`, in this order."""
    return {name: f'sum({metric}{{{ENGINE}, state="{name}"}})' for name in names}


def share(part: str, whole: str) -> str:
    """A share, 0 where there is nothing to have a share of."""
    return f"({part}) / ({whole} > 0) or vector(0)"


FAILED = ROUTER + ', code=~"INTERNAL|UNAVAILABLE|UNKNOWN|DATA_LOSS"'
REFUSED = ROUTER + ', code="RESOURCE_EXHAUSTED"'
BLOCKS = "octavo_engine_blocks"

SECTIONS = [
    Section(
        "Is it up?",
        [
            stat(
                "Engines up",
                f"max(sum by (instance) (octavo_router_engines_up{{{ROUTER}}})) or vector(0)",
                help="As the router sees them that sees the most.",
                thresholds=(-1, 0.5),
            ),
            stat("Requests", rate("octavo_router_requests_total", ROUTER), "reqps"),
            stat(
                "Failed",
                share(
                    rate("octavo_router_requests_total", FAILED),
                    rate("octavo_router_requests_total", ROUTER),
                ),
                "percentunit",
                help="INTERNAL, UNAVAILABLE, UNKNOWN, DATA_LOSS: the service's fault.",
                thresholds=(0.001, 0.02),
            ),
            stat(
                "Refused",
                share(
                    rate("octavo_router_requests_total", REFUSED),
                    rate("octavo_router_requests_total", ROUTER),
                ),
                "percentunit",
                help="RESOURCE_EXHAUSTED: a full queue, a deadline out of reach, or a quota.",
                thresholds=(0.01, 0.1),
            ),
            stat("Output", rate("octavo_router_output_tokens_total", ROUTER), "tokens/s"),
            stat(
                "First token, p95",
                quantiles("octavo_router_ttft_seconds", ROUTER)["p95"],
                "s",
                thresholds=(2, 10),
            ),
            stat(
                "Blocks in use",
                f'sum({BLOCKS}{{{ENGINE}, state="used"}}) / sum({BLOCKS}{{{ENGINE}}})',
                "percentunit",
                help="Cached ones do not count: they are given up as soon as they are needed.",
                thresholds=(0.8, 0.95),
            ),
            stat(
                "Alerts",
                'count(ALERTS{alertname=~"Octavo.*", alertstate="firing"}) or vector(0)',
                help="docs/operating.md says what to do on each.",
                thresholds=(0.5, 0.5),
            ),
        ],
    ),
    Section(
        "Is it slow?",
        [
            Panel(
                "Time to first token",
                quantiles("octavo_router_ttft_seconds", ROUTER),
                "s",
                "From a request's arrival at the router: queue, prefill, first step.",
            ),
            Panel(
                "Time between tokens",
                quantiles("octavo_router_itl_seconds", ROUTER),
                "s",
                "What a reader sees of the decode steps.",
            ),
            Panel(
                "Wait for an engine",
                quantiles("octavo_router_queue_time_seconds", ROUTER),
                "s",
                "In the router's queue. High: more is asked for than the engines have room for.",
            ),
            Panel(
                "Whole request",
                quantiles("octavo_router_request_duration_seconds", ROUTER),
                "s",
                "From arrival to end; mostly the number of tokens asked for.",
            ),
        ],
    ),
    Section(
        "Why is it slow?",
        [
            Panel(
                "Requests in the router",
                {
                    "in progress": "sum(octavo_router_requests_in_flight)",
                    "of these waiting": "sum(octavo_router_requests_queued)",
                },
                help="Waiting ones have no engine yet.",
            ),
            Panel(
                "Sequence groups in engines",
                states("octavo_engine_groups", "running", "waiting", "swapped"),
                help="Waiting with blocks free: --max-num-seqs is what holds them back. Swapped: "
                "preempted, their blocks in CPU memory.",
            ),
            Panel(
                "Preemptions",
                {
                    "{{mode}}": rate("octavo_engine_preemptions_total", ENGINE, "mode"),
                    "for want of swap space": rate("octavo_engine_swap_space_full_total", ENGINE),
                },
                "ops",
                "Work that is put aside, or done twice, because blocks ran out.",
            ),
            Panel(
                "Requests moved to another engine",
                {"{{model}}": rate("octavo_router_moves_total", ROUTER, "model")},
                "ops",
                "Their own died, hung or was drained.",
            ),
            Panel(
                "Step",
                quantiles("octavo_engine_step_seconds", ENGINE),
                "s",
                "One pass of the model over the batch: every running sequence's next token.",
            ),
            Panel(
                "Step of each engine, mean",
                {
                    "{{instance}}": f"rate(octavo_engine_step_seconds_sum{{{ENGINE}}}"
                    "[$__rate_interval]) / "
                    f"(rate(octavo_engine_step_seconds_count{{{ENGINE}}}[$__rate_interval]) > 0)"
                },
                "s",
                "One that is slower than the others has a worse machine, or not compiled yet.",
            ),
            Panel(
                "Batch",
                {
                    "tokens": rate("octavo_engine_batch_tokens_sum", ENGINE)
                    + " / ("
                    + rate("octavo_engine_batch_tokens_count", ENGINE)
                    + " > 0)",
                    "sequences": f"avg(octavo_engine_batch_sequences{{{ENGINE}}})",
                },
                help="Of a step, over all engines. Tokens far above sequences: prefills.",
            ),
            Panel(
                "Wait in engines",
                quantiles("octavo_engine_queue_seconds", ENGINE),
                "s",
                "From an engine's taking a request to its first step.",
            ),
        ],
    ),
    Section(
        "Is memory full?",
        [
            Panel(
                "KV-cache blocks",
                states(BLOCKS, "used", "cached", "free"),
                help="used: held by sequences. cached: prefixes, given up when needed.",
                stacked=True,
            ),
            Panel(
                "In use, each engine",
                {
                    "{{instance}}": f'{BLOCKS}{{{ENGINE}, state="used"}} / ignoring (state) '
                    f"sum without (state) ({BLOCKS}{{{ENGINE}}})"
                },
                "percentunit",
                "At 100% the next block preempts somebody.",
                maximum=1,
            ),
            Panel(
                "Swap space, blocks",
                states("octavo_engine_swap_blocks", "used", "cached", "free"),
                help="used: of preempted sequences. cached: prefixes that fell from the device.",
                stacked=True,
            ),
            Panel(
                "Prompts found in the cache",
                {
                    "share of prompt tokens": share(
                        rate("octavo_engine_cached_tokens_total", ENGINE),
                        rate("octavo_engine_prompt_tokens_total", ENGINE),
                    )
                },
                "percentunit",
                "What prefix caching saves of the prefills.",
                maximum=1,
            ),
            Panel(
                "Prefix blocks to swap space and back",
                {
                    "fallen": rate("octavo_engine_fallen_blocks_total", ENGINE),
                    "returned": rate("octavo_engine_returned_blocks_total", ENGINE),
                },
                "ops",
                "Many fall and few return: swap space that does not pay.",
            ),
            Panel(
                "Shared blocks",
                {"shared": f"sum(octavo_engine_shared_blocks{{{ENGINE}}})"},
                help="Held by several sequences, kept once.",
            ),
            Panel(
                "Places without a token",
                {"slots": f"sum(octavo_engine_wasted_slots{{{ENGINE}}})"},
                help="In last blocks; less than a block for each sequence.",
            ),
            Panel(
                "Memory of processes",
                {"{{instance}}": 'process_resident_memory_bytes{job=~"octavo-.*"}'},
                "bytes",
            ),
        ],
    ),
    Section(
        "Who is using it?",
        [
            Panel(
                "Requests by tenant",
                {"{{tenant}}": rate("octavo_router_tenant_requests_total", "", "tenant")},
                "reqps",
            ),
            Panel(
                "Tokens by tenant",
                {
                    "{{tenant}} {{kind}}": rate(
                        "octavo_router_tenant_tokens_total", "", "tenant, kind"
                    )
                },
                "tokens/s",
            ),
            Panel(
                "Tenants' calls that failed",
                {
                    "{{tenant}} {{code}}": rate(
                        "octavo_router_tenant_requests_total", 'code!="OK"', "tenant, code"
                    )
                },
                "reqps",
                "RESOURCE_EXHAUSTED: over a limit of theirs, or no room. CANCELLED: they left.",
            ),
            Panel(
                "Calls by status",
                {
                    "{{code}}": rate("octavo_router_requests_total", ROUTER, "code"),
                    "no valid key": rate("octavo_router_unauthenticated_total", ""),
                },
                "reqps",
            ),
        ],
    ),
    Section(
        "What is running?",
        [
            Panel(
                "Versions",
                {
                    "router {{version}}": "count by (version) (octavo_router_info)",
                    "{{model}} {{version}} {{device}} {{dtype}}": "count by "
                    "(model, version, device, dtype) (octavo_engine_info)",
                },
                width=8,
            ),
            Panel(
                "CPU",
                {
                    "{{instance}}": 'rate(process_cpu_seconds_total{job=~"octavo-.*"}'
                    "[$__rate_interval])"
                },
                "cores",
                width=8,
            ),
            Panel(
                "Engines that run compiled",
                {
                    "compiled": f"sum(octavo_engine_compiled{{{ENGINE}}})",
                    "engines": f"count(octavo_engine_info{{{ENGINE}}})",
                },
                help="On a CPU; those that do not yet are slower.",
                width=8,
            ),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for section in SECTIONS:
        position = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        panels.append({"type": "row", "title": section.question, "gridPos": position, "panels": []})
        y, x = y + 1, 0
        for panel in section.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + panel.height
            panels.append(_panel(panel, x, y))
            x += panel.width
        y += section.panels[-1].height
    for number, made in enumerate(panels, 1):
        made["id"] = number
    return {
        "uid": "octavo",
        "title": "Octavo",
        "description": "Made by tools/dashboard.py: change that, not this.",
        "tags": ["octavo"],
        "schemaVersion": 41,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    """The datasource, and what the panels can be narrowed to."""
    source = {
        "name": "source",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
    }
    return [
        source,
        _variable("model", "label_values(octavo_router_requests_total, model)"),
        _variable("engine", 'label_values(octavo_engine_info{model=~"$model"}, instance)'),
    ]


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(panel: Panel, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": _UNITS.get(panel.unit, panel.unit), "min": 0}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.kind == "stat":
        defaults["color"] = {"mode": "thresholds"}
        defaults["thresholds"] = {"mode": "absolute", "steps": _steps(panel.thresholds)}
        options: dict[str, Any] = {
            "graphMode": "area",
            "colorMode": "value",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    else:
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 8,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend or "__auto",
            }
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


_UNITS = {"tokens/s": "suffix: tokens/s", "cores": "suffix: cores"}


def _steps(thresholds: tuple[float, float] | None) -> list[dict[str, Any]]:
    """Colours from each value on; the first also for all below."""
    if thresholds is None:
        return [{"color": "blue", "value": None}]
    orange, red = thresholds
    if orange < 0:  # low is what is bad
        return [{"color": "red", "value": None}, {"color": "green", "value": red}]
    return [
        {"color": "green", "value": None},
        {"color": "orange", "value": orange},
        {"color": "red", "value": red},
    ]


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n")
