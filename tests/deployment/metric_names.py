"""The names of exported metrics, and of metrics in PromQL."""

import asyncio
import re

from tools import metric_table


def exported_names() -> set[str]:
    """Return every metric name that a router or an engine exports."""
    found = set()
    for registry in asyncio.run(metric_table.registries()).values():
        for metric, _ in metric_table.metrics(registry):
            suffixes = metric_table.SUFFIXES.get(metric.type, ("",))
            found |= {f"{metric.name}{suffix}" for suffix in suffixes}
    return found


def names(expression: str) -> set[str]:
    """Return the metrics in PromQL: words before { or [, or with a prefix of metrics alone."""
    bare = re.sub(r'"[^"]*"', "", expression)
    return set(re.findall(r"\b(?:(?:octavo|process)_\w+|\w+(?={))", bare))
