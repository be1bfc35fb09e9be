"""Loads the models of a catalog on demand, within a bound of memory."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import grpc
import structlog

from octavo.cli.child_process import ChildProcess
from octavo.cli.engine_process import EngineProcess, SpareEngine
from octavo.cli.models.catalog import CatalogModel
from octavo.cli.models.hosted_model import HostedModel, NoRoomError
from octavo.common import rpc
from octavo.common.background import end, keep_running
from octavo.common.news import News
from octavo.engine.settings import EngineSettings
from octavo.router.on_demand import OnLoading
from octavo.v1 import generation_pb2

if TYPE_CHECKING:
    from octavo.router.engines.pool import EnginePool

log = structlog.get_logger(__name__)

PATIENCE = 5.0
"""Seconds that a model waits for another to become idle. After them, new requests of the one that
was loaded first wait, so that it does."""

SPARE_MEMORY = 300 << 20
"""Bytes of an engine process without a model."""


class Supervisor:
    """Hosts the models of a catalog: `octavo.router.on_demand.OnDemandModels`.

    Args:
        memory: Maximum memory of all loaded models together, in bytes.
        directory: Directory of the engines' sockets.
        spare_engine: Whether an engine process without a model is kept ready.
    """

    def __init__(self, memory: int, directory: Path, *, spare_engine: bool) -> None:
        self._memory = memory
        self._directory = directory
        self._news = News()
        self._hosted: dict[str, HostedModel] = {}
        self._sockets = itertools.count()
        self._reserved: dict[HostedModel, int] = {}
        self._keeps_spare = spare_engine
        self._spare: SpareEngine | None = None
        self._turn = asyncio.Lock()  # models get memory in the order in which they ask

    def apply(self, models: Sequence[CatalogModel]) -> None:
        """Offer these models instead of the present ones.

        A model with other settings is loaded again once its requests are complete, and a model that
        is gone is unloaded then.
        """
        before, self._hosted = self._hosted, {}
        for model in models:
            hosted = before.pop(model.name, None)
            if hosted is None:
                socket = self._directory / f"model-{next(self._sockets)}.sock"
                hosted = HostedModel(model, socket, self._reserve, self._begin, self._news)
            hosted.model = model
            self._hosted[model.name] = hosted
        for hosted in before.values():
            hosted.retire()
        self._news.tell()

    def offered(self) -> Mapping[str, Sequence[str]]:
        """Return the aliases of each model and adapter that can be loaded, by its name."""
        models: dict[str, Sequence[str]] = {}
        for name, hosted in self._hosted.items():
            models[name] = hosted.model.aliases
            models |= dict.fromkeys(hosted.model.settings.adapters, ())
        return models

    def hold(
        self, model: str, on_loading: OnLoading | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Load a model, and keep it loaded within the block; do nothing if it is not offered.

        Args:
            model: The model.
            on_loading: Called while it is not loaded: at once, and every few seconds.

        Raises:
            rpc.RpcError: UNAVAILABLE if it failed to load, FAILED_PRECONDITION if it does not fit
                into the memory.
        """
        hosted = self._find(model)
        return nullcontext() if hosted is None else hosted.hold(on_loading)

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

    async def run(self, pool: "EnginePool") -> NoReturn:
        """Load and unload models until cancelled, then end their engines."""
        tasks: dict[HostedModel, asyncio.Task[None]] = {}
        try:
            while True:
                for hosted in {*self._hosted.values()} - tasks.keys():
                    tasks[hosted] = keep_running(partial(hosted.run, pool), hosted.model.name)
                tasks = {hosted: task for hosted, task in tasks.items() if not task.done()}
                self._keep_spare()
                await self._news.wait()
        finally:
            await end(*tasks.values())
            if self._spare is not None:
                self._spare.stop()

    def _keep_spare(self) -> None:
        """Start a spare engine for the next model, while none is being loaded, if it has room."""
        if not self._keeps_spare or self._spare is not None:
            return
        states = {each.state for each in self._hosted.values()}
        free = self._memory - sum(self._reserved.values())
        busy = generation_pb2.MODEL_STATE_LOADING in states
        if busy or states == {generation_pb2.MODEL_STATE_LOADED} or free < SPARE_MEMORY:
            return
        spare = SpareEngine()
        try:
            spare.start()
        except OSError as error:
            log.warning("no spare engine", reason=str(error))
            self._keeps_spare = False
        else:
            self._spare = spare

    def _begin(self, settings: EngineSettings, socket: Path, name: str) -> ChildProcess:
        """Return a process that begins to serve a model: the spare one, if there is one."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.alive and settings.ranks == 1:
            spare.serve(settings, socket, name)
            return spare
        if spare is not None:
            spare.stop()
        engine = EngineProcess(settings, socket, name)
        engine.start()
        return engine

    def _find(self, model: str) -> HostedModel | None:
        for hosted in self._hosted.values():
            if model == hosted.model.name or model in hosted.model.settings.adapters:
                return hosted
        return None

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
