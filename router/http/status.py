"""The engines' load, as last reported."""

from collections.abc import Set as AbstractSet
from typing import Any

from octavo.router.engines.link import EngineLink
from octavo.router.engines.pool import EnginePool
from octavo.router.generate import Generator
from octavo.v1 import engine_pb2

LOAD = [field.name for field in engine_pb2.Load.DESCRIPTOR.fields]


def status(pool: EnginePool, generator: Generator, models: AbstractSet[str]) -> dict[str, Any]:
    """Return the figures of the engines of `models` that are connected, and of the router.

    Addresses are left out: they are the operator's business, and AdminService has them.
    """
    return {
        "requests": generator.in_flight,
        "output_tokens": generator.metrics.total_output_tokens,
        "engines": [
            _engine(link)
            for link in pool.links
            if link.up and not models.isdisjoint(link.up.models)
        ],
    }


def _engine(link: EngineLink) -> dict[str, Any]:
    engine = link.up
    assert engine is not None
    info, load = engine.info, engine.load
    return {
        "model": info.model,
        "device": info.device,
        "dtype": info.dtype,
        "block_size": info.block_size,
        "block_bytes": info.block_bytes,
        "max_num_seqs": info.max_num_seqs,
        "taking_requests": link.taking is not None,
        "sequences": engine.sequences,
        "load": {name: getattr(load, name) for name in LOAD},
    }
