"""Merges an engine's status from all workers of a router."""

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from octavo.v1 import admin_pb2

_ORDER = (
    admin_pb2.ENGINE_STATE_CONNECTING,
    admin_pb2.ENGINE_STATE_DRAINING,
    admin_pb2.ENGINE_STATE_SERVING,
)
"""Order of states: the first one that any worker reports is the engine's state."""


def merged_status(statuses: Iterable[admin_pb2.EngineStatus]) -> admin_pb2.EngineStatus:
    """Merge one engine's status from several workers.

    The result has the sum of the workers' sequences, and is connected if all workers are.
    """
    known = list(statuses)
    fullest = max(known, key=lambda status: (status.HasField("load"), bool(status.model)))
    merged = admin_pb2.EngineStatus()
    merged.CopyFrom(fullest)
    merged.state = min((status.state for status in known), key=_ORDER.index)
    merged.sequences = sum(status.sequences for status in known)
    merged.problem = next((status.problem for status in known if status.problem), "")
    return merged


def merged_lists(
    lists: Iterable[Iterable[admin_pb2.EngineStatus]],
) -> list[admin_pb2.EngineStatus]:
    """Return the merged status of every engine, by address."""
    by_address: dict[str, list[admin_pb2.EngineStatus]] = {}
    for statuses in lists:
        for status in statuses:
            by_address.setdefault(status.address, []).append(status)
    return [merged_status(by_address[address]) for address in sorted(by_address)]


def merged_stats(stats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the workers' stats for GET /status."""
    engines: dict[str, dict[str, Any]] = {}
    for each in stats:
        for engine in each["engines"]:
            merged = engines.setdefault(engine["instance"], {**engine, "sequences": 0})
            merged["sequences"] += engine["sequences"]
    return {
        "requests": sum(each["requests"] for each in stats),
        "output_tokens": sum(each["output_tokens"] for each in stats),
        "engines": sorted(engines.values(), key=itemgetter("address")),
    }
