"""Loads the models of a catalog on demand, within a bound of memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from octavo.cli.models.catalog import CatalogModel
from octavo.cli.models.hosted_model import HostedModel, NoRoomError
from octavo.cli.models.news import News
from octavo.common import rpc
from octavo.common.background import first_to_end
from octavo.v1 import generation_pb2

if TYPE_CHECKING:
    from octavo.router.engines.pool import EnginePool

PATIENCE = 5.0
"""Seconds that a model waits for another to become idle. After them, new requests of the one that
was loaded first wait, so that it does."""


class Supervisor:
    """Hosts the models of a catalog: `octavo.router.on_demand.OnDemandModels`.

    Args:
        models: The models.
        memory: Maximum memory of all loaded models together, in bytes.
        directory: Directory of the engines' sockets.
    """

    def __init__(self, models: Sequence[CatalogModel], memory: int, directory: Path) -> None:
        self._memory = memory
        self._news = News()
        self._hosted = {
            model.name: HostedModel(
                model, directory / f"model-{number}.sock", self._reserve, self._news
            )
            for number, model in enumerate(models)
        }
        self._adapters = {name: each.name for each in models for name in each.settings.adapters}
        self._reserved: dict[HostedModel, int] = {}
        self._turn = asyncio.Lock()  # models get memory in the order in which they ask

    @property
    def offered(self) -> Mapping[str, Sequence[str]]:
        """Aliases of each model and adapter that can be loaded, by its name."""
        return {
            name: hosted.model.aliases for name, hosted in self._hosted.items()
        } | dict.fromkeys(self._adapters, ())

    def hold(self, model: str) -> AbstractAsyncContextManager[None]:
        """Load a model, and keep it loaded within the block; do nothing if it is not offered.

        Raises:
            rpc.RpcError: UNAVAILABLE if it failed to load, FAILED_PRECONDITION if it does not fit
                into the memory.
        """
        hosted = self._find(model)
        return nullcontext() if hosted is None else hosted.hold()

    def state(self, model: str) -> generation_pb2.ModelState.ValueType:
        """Return a model's state; unspecified if it is not offered."""
        hosted = self._find(model)
        return generation_pb2.MODEL_STATE_UNSPECIFIED if hosted is None else hosted.state

    async def unload(self, model: str) -> None:
        """Unload a model once its requests are complete; wait until its memory is free.

        Raises:
            rpc.RpcError: NOT_FOUND if it is not offered, FAILED_PRECONDITION if it is pinned.
        """
        hosted = self._find(model)
        if hosted is None:
            raise rpc.not_found("model", f"model {model[:128]!r} is not offered")
        if hosted.model.pinned:
            raise rpc.RpcError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"model {model!r} is pinned: remove `pin` from its table",
                field="model",
            )
        await hosted.unload()

    async def run(self, pool: "EnginePool") -> None:
        """Load and unload models until cancelled, then end their engines."""
        await first_to_end(**{name: each.run(pool) for name, each in self._hosted.items()})

    def _find(self, model: str) -> HostedModel | None:
        return self._hosted.get(self._adapters.get(model, model))

    @asynccontextmanager
    async def _reserve(self, hosted: HostedModel, size: int) -> AsyncIterator[None]:
        """Reserve memory for a model within the block; others are unloaded for it.

        Raises:
            NoRoomError: It would not fit beside the pinned models alone.
        """
        async with self._turn:
            await self._make_room(hosted, size)
            self._reserved[hosted] = size
        try:
            yield
        finally:
            del self._reserved[hosted]
            self._news.tell()

    async def _make_room(self, hosted: HostedModel, size: int) -> None:
        """Unload the least recently used models until `size` bytes are free.

        Only models that no request holds are unloaded.

        Raises:
            NoRoomError: Not enough would be free even without all models that are not pinned.
        """
        pinned = sum(held for other, held in self._reserved.items() if other.model.pinned)
        if size > self._memory - pinned:
            raise NoRoomError(_no_room(hosted.model.name, size, self._memory, pinned))
        since = time.monotonic()
        while sum(self._reserved.values()) + size > self._memory:
            staying = {m: held for m, held in self._reserved.items() if not m.leaving}
            if sum(staying.values()) + size > self._memory:
                patience = since + PATIENCE - time.monotonic()
                if victim := _victim(staying, forced=patience <= 0):
                    victim.leave()
                    continue
                await self._news.wait(max(patience, 0.0) or None)
            else:
                await self._news.wait()


def _victim(models: Mapping[HostedModel, int], *, forced: bool) -> HostedModel | None:
    """Return the model to unload next, if any.

    Args:
        models: The models that have memory and are not leaving.
        forced: Whether it may be one that requests hold, which then finish first.
    """
    loaded = [each for each in models if each.loaded and not each.model.pinned]
    if idle := [each for each in loaded if not each.in_use]:
        return min(idle, key=lambda each: each.used_at)
    return min(loaded, key=lambda each: each.loaded_at, default=None) if forced else None


def _no_room(name: str, size: int, memory: int, pinned: int) -> str:
    """Describe that a model does not fit."""
    beside = f" of which pinned models use {_gib(pinned)}" if pinned else ""
    return (
        f"model {name!r} needs {_gib(size)} of memory, but --memory is {_gib(memory)}{beside}; a"
        " smaller model or quantization, or a lower cache_memory, would fit"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
