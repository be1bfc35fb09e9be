"""Write the Grafana dashboard, docker/grafana/dashboards/octavo.json.

    python -m tools.dashboard

Panels are grouped by the operator's question that they answer.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "docker" / "grafana" / "dashboards" / "octavo.json"
COLUMNS = 24
"""Width of Grafana's grid."""
SOURCE = {"type": "prometheus", "uid": "${source}"}

ROUTER = 'model=~"$model"'
ENGINE = 'instance=~"$engine"'


@dataclass(frozen=True)
class Panel:
    """One chart or number.

    Attributes:
        title: Its title.
        queries: PromQL by legend; a legend may have {{label}}s.
        unit: Grafana's name of it.
        help: Tooltip: how to read it.
        kind: "timeseries" or "stat".
        width: Width in columns.
        stacked: Whether the series are parts of a whole.
        thresholds: Values from which a number is orange, and red.
        maximum: The axis' upper end. None: automatic.
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
        """Height in rows of the grid."""
        return 4 if self.kind == "stat" else 8


@dataclass(frozen=True)
class Section:
    """Panels that answer one question."""

    question: str
    panels: list[Panel] = field(default_factory=list)


def stat(title: str, query: str, unit: str = "short", **more: Any) -> Panel:  # noqa: ANN401
    """Return a panel with the current value over its history."""
    return Panel(title, {"": query}, unit, kind="stat", width=3, **more)


def quantiles(metric: str, labels: str, by: str = "") -> dict[str, str]:
    """Return queries for the 50th, 95th and 99th percentile of a histogram."""
    rate = f"sum by (le{by}) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return {f"p{q}": f"histogram_quantile(0.{q}, {rate})" for q in (50, 95, 99)}


def rate(metric: str, labels: str, by: str = "") -> str:
    """Return a query for a counter's rate per second, summed over all labels except `by`."""
    total = f"rate({metric}{{{labels}}}[$__rate_interval])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def states(metric: str, *names: str) -> dict[str, str]:
    """Return queries for an engine gauge by its label `state`, in this order."""
    return {name: f'sum({metric}{{{ENGINE}, state="{name}"}})' for name in names}


def share(part: str, whole: str) -> str:
    """Return a query for a ratio; 0 if the whole is 0."""
    return f"({part}) / ({whole} > 0) or vector(0)"


FAILED = ROUTER + ', code=~"INTERNAL|UNAVAILABLE|UNKNOWN|DATA_LOSS"'
REFUSED = ROUTER + ', code="RESOURCE_EXHAUSTED"'
BLOCKS = "octavo_engine_blocks"
KV_CACHE_USAGE = "octavo_engine_kv_cache_usage_ratio"

SECTIONS = [
    Section(
        "Is it up?",
        [
            stat(
                "Engines up",
                f"max(sum by (instance) (octavo_router_engines_up{{{ROUTER}}})) or vector(0)",
                help="Of the router that sees the most.",
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
                help="INTERNAL, UNAVAILABLE, UNKNOWN, DATA_LOSS: failures of the server.",
                thresholds=(0.001, 0.02),
            ),
            stat(
                "Refused",
                share(
                    rate("octavo_router_requests_total", REFUSED),
                    rate("octavo_router_requests_total", ROUTER),
                ),
                "percentunit",
                help="RESOURCE_EXHAUSTED: a full queue, a deadline that is too short, or a quota.",
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
                "Used blocks",
                f"avg({KV_CACHE_USAGE}{{{ENGINE}}})",
                "percentunit",
                help="Mean over engines, without cached blocks, which are evicted on demand.",
                thresholds=(0.8, 0.95),
            ),
            stat(
                "Alerts",
                'count(ALERTS{alertname=~"Octavo.*", alertstate="firing"}) or vector(0)',
                help="docs/operating.md tells what to do about each.",
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
                "Inter-token latency: time between two tokens of an output.",
            ),
            Panel(
                "Wait for an engine",
                quantiles("octavo_router_queue_time_seconds", ROUTER),
                "s",
                "Time in the router's queue. High: demand exceeds the engines' capacity.",
            ),
            Panel(
                "Whole request",
                quantiles("octavo_router_request_duration_seconds", ROUTER),
                "s",
                "From arrival to end. Depends mostly on the number of output tokens.",
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
                    "waiting": "sum(octavo_router_requests_queued)",
                },
                help="Waiting: in the queue, without an engine.",
            ),
            Panel(
                "Sequence groups in engines",
                states("octavo_engine_groups", "running", "waiting", "swapped"),
                help="Waiting although blocks are free: --max-num-seqs limits the batch. Swapped: "
                "preempted to CPU memory.",
            ),
            Panel(
                "Preemptions",
                {
                    "{{mode}}": rate("octavo_engine_preemptions_total", ENGINE, "mode"),
                    "swap space full": rate("octavo_engine_swap_space_full_total", ENGINE),
                },
                "ops",
                "Requests swapped out or recomputed because blocks ran out.",
            ),
            Panel(
                "Migrations",
                {"{{model}}": rate("octavo_router_migrations_total", ROUTER, "model")},
                "ops",
                "Requests that continue on another engine: theirs ended, hung or drained.",
            ),
            Panel(
                "Step",
                quantiles("octavo_engine_step_seconds", ENGINE),
                "s",
                "Duration of a step: one forward pass over the batch.",
            ),
            Panel(
                "Step of each engine, mean",
                {
                    "{{instance}}": f"rate(octavo_engine_step_seconds_sum{{{ENGINE}}}"
                    "[$__rate_interval]) / "
                    f"(rate(octavo_engine_step_seconds_count{{{ENGINE}}}[$__rate_interval]) > 0)"
                },
                "s",
                "A slower engine has a slower machine, or its model runs in Python.",
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
                help="Mean per step over all engines. Far more tokens than sequences: prefill.",
            ),
            Panel(
                "Wait in engines",
                quantiles("octavo_engine_queue_seconds", ENGINE),
                "s",
                "From a request's arrival at the engine to its first step.",
            ),
        ],
    ),
    Section(
        "Is memory full?",
        [
            Panel(
                "KV-cache blocks",
                states(BLOCKS, "used", "cached", "free"),
                help="used: in block tables. cached: prefixes, evicted on demand.",
                stacked=True,
            ),
            Panel(
                "Used, by engine",
                {"{{instance}}": f"{KV_CACHE_USAGE}{{{ENGINE}}}"},
                "percentunit",
                "At 100% the next block preempts a request.",
                maximum=1,
            ),
            Panel(
                "Swap space, blocks",
                states("octavo_engine_swap_blocks", "used", "cached", "free"),
                help="used: of preempted sequences. cached: prefixes that fell from the device.",
                stacked=True,
            ),
            Panel(
                "Prefix cache hits",
                {
                    "share of prompt tokens": share(
                        rate("octavo_engine_cached_tokens_total", ENGINE),
                        rate("octavo_engine_prompt_tokens_total", ENGINE),
                    )
                },
                "percentunit",
                "Share of prefill that prefix caching saves.",
                maximum=1,
            ),
            Panel(
                "Prefix blocks to swap space and back",
                {
                    "offloaded": rate("octavo_engine_offloaded_blocks_total", ENGINE),
                    "restored": rate("octavo_engine_restored_blocks_total", ENGINE),
                },
                "ops",
                "Many fall and few return: swap space that does not pay.",
            ),
            Panel(
                "Shared blocks",
                {"shared": f"sum(octavo_engine_shared_blocks{{{ENGINE}}})"},
                help="Blocks in more than one block table.",
            ),
            Panel(
                "Wasted slots",
                {"slots": f"sum(octavo_engine_wasted_slots{{{ENGINE}}})"},
                help="Token slots in used blocks without a token: less than a block per sequence.",
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
                "RESOURCE_EXHAUSTED: above a quota, or no room. CANCELLED: the client left.",
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
                "Engines whose model does not run in Python",
                {
                    "without Python": f"sum(octavo_engine_compiled{{{ENGINE}}})",
                    "engines": f"count(octavo_engine_info{{{ENGINE}}})",
                },
                help="Models that cannot be traced or compiled run in Python, which is slower.",
                width=8,
            ),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON."""
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
        "description": "Generated by tools/dashboard.py: edit that file.",
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
    """Return the dashboard's variables: the datasource, the model, the engine."""
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
