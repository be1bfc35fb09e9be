"""One model of a catalog: its engine process, and the requests that hold it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import structlog

from octavo.cli.child_process import ChildProcess
from octavo.cli.models.catalog import CatalogModel
from octavo.cli.running import EXPECTED, StartError
from octavo.common import rpc
from octavo.common.background import call_in_thread, joined
from octavo.common.models.errors import ModelError
from octavo.common.news import News
from octavo.engine.settings import EngineSettings
from octavo.router.on_demand import OnLoading
from octavo.v1 import generation_pb2

if TYPE_CHECKING:
    from octavo.router.engines.pool import EnginePool

log = structlog.get_logger(__name__)

CONNECT_SECONDS = 60.0
"""Seconds for the router to connect to an engine that is ready."""
LOADING_SECONDS = 10.0
"""Seconds between two messages to a client whose request waits."""
RETRY_SECONDS = 2.0
"""Seconds after a failed load before the next attempt, for which new requests wait."""
MAX_RETRY_SECONDS = 60.0
"""Maximum seconds between two attempts to load a pinned model that no request needs."""


class NoRoomError(Exception):
    """A model does not fit into the memory; the message says what would."""


Reserve = Callable[["HostedModel", int], AbstractAsyncContextManager[None]]
"""Reserves an amount of memory for a model, in bytes; raises NoRoomError."""
Begin = Callable[[EngineSettings, Path, str], ChildProcess]
"""Starts an engine process; the arguments are those of `EngineProcess`."""


class HostedModel:
    """Loads a model when a request holds it; unloads it when told, or idle for its timeout.

    Args:
        model: The model.
        socket: Path of its engine's Unix socket.
        reserve: Reserves the memory of its engine.
        begin: Starts its engine.
        news: Tells of every change of any model.

    Attributes:
        model: The model; with other settings it is loaded again.
        state: Whether it is loaded.
        loaded_at: Monotonic time at which it was loaded last.
        used_at: Monotonic time at which a request last held it.
    """

    def __init__(
        self, model: CatalogModel, socket: Path, reserve: Reserve, begin: Begin, news: News
    ) -> None:
        self.model = model
        self.state: generation_pb2.ModelState.ValueType = generation_pb2.MODEL_STATE_UNLOADED
        self.loaded_at = self.used_at = 0.0
        self._socket = socket
        self._address = f"unix:{socket}"
        self._reserve = reserve
        self._begin = begin
        self._news = news
        self._retired = False
        self._holders = 0
        self._waiting = 0
        self._failures = 0
        self._failure: Exception = StartError("it was not loaded")

    @property
    def loaded(self) -> bool:
        """Whether requests can use it."""
        return self.state == generation_pb2.MODEL_STATE_LOADED

    @property
    def leaving(self) -> bool:
        """Whether it is unloaded as soon as no request holds it."""
        return self.state == generation_pb2.MODEL_STATE_UNLOADING

    @property
    def in_use(self) -> bool:
        """Whether requests hold it or wait for it."""
        return bool(self._holders or self._waiting)

    @asynccontextmanager
    async def hold(self, on_loading: OnLoading | None = None) -> AsyncIterator[None]:
        """Wait until the model is loaded, and keep it loaded within the block.

        Args:
            on_loading: Called while it is not loaded: at once, and every few seconds.

        Raises:
            rpc.RpcError: UNAVAILABLE if it failed to load, FAILED_PRECONDITION if it does not fit.
        """
        failures = self._failures
        self._waiting += 1
        position = self._waiting
        self._news.tell()

        def decided() -> bool:
            return self.loaded or self._failures > failures or self._retired

        try:
            while not decided():
                if on_loading is not None:
                    await on_loading(position)
                await self._news.until(decided, LOADING_SECONDS)
            if not self.loaded:
                self._refuse()
            self._holders += 1
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._holders -= 1
            self.used_at = time.monotonic()
            self._news.tell()

    def leave(self) -> None:
        """Unload it once no request holds it; requests that come later wait until it is back."""
        if self.loaded:
            self._become(generation_pb2.MODEL_STATE_UNLOADING)

    def retire(self) -> None:
        """Take no more requests; `run` ends once those that hold the model are complete."""
        self._retired = True
        self.leave()

    async def unload(self) -> None:
        """Unload it once no request holds it; wait until its memory is free."""
        await self._news.until(lambda: self.state != generation_pb2.MODEL_STATE_LOADING)
        self.leave()
        await self._news.until(lambda: not self.leaving)

    async def run(self, pool: "EnginePool") -> None:
        """Load and unload it, until it is retired or this is cancelled.

        Args:
            pool: The router's engines.
        """
        pause = RETRY_SECONDS
        while not self._retired:
            await self._news.until(lambda: self.model.pinned or self.in_use or self._retired)
            if self._retired:
                break
            model, loaded_at = self.model, self.loaded_at
            self._become(generation_pb2.MODEL_STATE_LOADING)
            try:
                memory = await call_in_thread(model.memory)
                async with self._reserve(self, memory):
                    await self._serve(pool)
                self._become(generation_pb2.MODEL_STATE_UNLOADED)
            except Exception as error:  # noqa: BLE001 - logged; else its requests would wait forever
                served = self.loaded_at != loaded_at
                self._fail(error, served=served)
                pause = RETRY_SECONDS if served else min(2 * pause, MAX_RETRY_SECONDS)
                await asyncio.sleep(RETRY_SECONDS)
                await self._news.until(partial(self._needed, instead_of=model), pause)
        if self._address in pool:
            await pool.remove(self._address)
        self._news.tell()

    def _fail(self, error: Exception, *, served: bool) -> None:
        """Note that the engine failed, before or after it `served` requests."""
        expected = isinstance(error, (*EXPECTED, NoRoomError))
        log.error(
            "model failed",
            model=self.model.name,
            reason=str(error),
            exc_info=not expected and error,
        )
        if not served:  # else requests wait until it is back
            self._failure = error
            self._failures += 1
        self._become(generation_pb2.MODEL_STATE_FAILED)

    def _needed(self, instead_of: CatalogModel) -> bool:
        """Return whether to go on at once after a failed load, even if it may fail again."""
        return self.in_use or self._retired or self.model is not instead_of

    async def _serve(self, pool: "EnginePool") -> None:
        """Run its engine until it is unloaded.

        Raises:
            ModelError: The router cannot load its tokenizer.
            StartError: The engine failed to start, or ended.
        """
        begun, name, settings = time.monotonic(), self.model.name, self.model.settings
        log.info("model loading", model=name)
        engine = self._begin(settings, self._socket, f"the engine of {name!r}")
        try:
            loading = pool.load_tokenizer(settings.source)
            async with joined(loading, expected=(ModelError,)) as (tokenizer,):
                await engine.ready()
                await tokenizer
            pool.add(self._address)
            async with asyncio.timeout(CONNECT_SECONDS):
                await _while_alive(engine, pool.until_up(self._address))
            self.loaded_at = self.used_at = time.monotonic()
            self._become(generation_pb2.MODEL_STATE_LOADED)
            log.info("model loaded", model=name, seconds=round(self.loaded_at - begun, 2))
            await _while_alive(engine, self._until_unwanted(settings))
            self._become(generation_pb2.MODEL_STATE_UNLOADING)
        except TimeoutError:
            raise StartError(f"the router did not connect within {CONNECT_SECONDS:g} s") from None
        finally:
            await self._end(engine, pool)
        log.info("model unloaded", model=name)

    async def _until_unwanted(self, settings: EngineSettings) -> None:
        """Wait until it is to be unloaded and no request holds it.

        Args:
            settings: The settings of its engine.
        """
        while not (self.leaving and not self._holders):
            if self._retired or self.model.settings != settings:
                self.leave()
                continue
            timeout = self.model.idle_timeout
            unused = time.monotonic() - self.used_at
            expires = bool(timeout) and not (self.model.pinned or self.in_use)
            if expires and unused >= timeout:
                return
            await self._news.wait(timeout - unused if expires else None)

    async def _end(self, engine: ChildProcess, pool: "EnginePool") -> None:
        """Stop the engine; its unfinished requests wait in the router for the next engine."""
        if self._address in pool:
            await pool.disconnect(self._address)
        await call_in_thread(engine.stop)

    def _become(self, state: generation_pb2.ModelState.ValueType) -> None:
        self.state = state
        self._news.tell()

    def _refuse(self) -> NoReturn:
        """Raise the error of a request for a model that failed to load, or is gone."""
        if self._retired:
            raise rpc.not_found("model", f"model {self.model.name!r} is not served any more")
        if isinstance(self._failure, NoRoomError):
            raise rpc.RpcError(grpc.StatusCode.FAILED_PRECONDITION, str(self._failure))
        raise rpc.unavailable(
            f"model {self.model.name!r} could not be loaded; the server's log says why",
            retry_after=RETRY_SECONDS,
        )


async def _while_alive(engine: ChildProcess, work: Coroutine[Any, Any, None]) -> None:
    """Wait for a work that needs an engine.

    Raises:
        StartError: The engine has ended.
    """
    async with joined(engine.ended(), work) as (ended, working):
        await asyncio.wait((ended, working), return_when=asyncio.FIRST_COMPLETED)
        engine.check()
        await working
