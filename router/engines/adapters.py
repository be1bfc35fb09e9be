"""Load and unload adapters on the engines of a pool."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio

from octavo.common import rpc
from octavo.router.engines.engine import Engine
from octavo.router.engines.pool import EnginePool
from octavo.v1 import admin_pb2, engine_pb2


class PoolAdapters:
    """The adapters of a pool's engines.

    Args:
        pool: The engines.
    """

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def loaded(self) -> list[admin_pb2.AdapterStatus]:
        """Return the adapters of connected engines, by name."""
        names = {name for engine in self._pool.up() for name in engine.adapters}
        return [self.status(name) for name in sorted(names)]

    def status(self, name: str) -> admin_pb2.AdapterStatus:
        """Return an adapter and the engines that have it.

        Raises:
            rpc.RpcError: NOT_FOUND if no engine has the adapter.
        """
        engines = sorted(self._having(name), key=lambda engine: engine.address)
        if not engines:
            raise _not_loaded(name)
        return admin_pb2.AdapterStatus(
            adapter=engines[0].adapters[name],
            base_model=engines[0].info.model,
            addresses=[engine.address for engine in engines],
        )

    async def load(self, name: str, path: str, address: str, timeout: float | None) -> None:
        """Load an adapter.

        Args:
            name: The adapter's model name in requests.
            path: The adapter's directory, on the engines' machines.
            address: The engine's address; empty: every connected engine.
            timeout: Timeout in seconds; None: no limit.

        Raises:
            rpc.RpcError: The first error of an engine; NOT_FOUND or UNAVAILABLE if no engine is
                connected.
        """
        request = engine_pb2.EngineServiceLoadAdapterRequest(name=name, path=path)

        async def load(engine: Engine) -> None:
            response = await engine.stub.LoadAdapter(request, timeout=timeout)
            self._set(engine, {**engine.adapters, name: response.adapter})

        await _for_each(self._engines(address), load)

    async def unload(self, name: str, address: str, timeout: float | None) -> None:
        """Unload an adapter; its running requests finish.

        Args:
            name: The adapter's name.
            address: The engine's address; empty: every connected engine that has the adapter.
            timeout: Timeout in seconds; None: no limit.

        Raises:
            rpc.RpcError: NOT_FOUND if no engine has the adapter; else the first error of an engine.
        """
        engines = self._engines(address) if address else self._having(name)
        if not engines:
            raise _not_loaded(name)
        request = engine_pb2.EngineServiceUnloadAdapterRequest(name=name)

        async def unload(engine: Engine) -> None:
            await engine.stub.UnloadAdapter(request, timeout=timeout)
            self._set(
                engine, {key: adapter for key, adapter in engine.adapters.items() if key != name}
            )

        await _for_each(engines, unload)

    def _having(self, name: str) -> list[Engine]:
        return [engine for engine in self._pool.up() if name in engine.adapters]

    def _engines(self, address: str) -> list[Engine]:
        """Return the engine at an address, or all connected ones."""
        engines = self._pool.up()
        if address:
            engine = self._pool.link(address).up
            engines = [] if engine is None else [engine]
        if not engines:
            raise rpc.unavailable(f"no engine is connected{f' at {address}' if address else ''}")
        return engines

    def _set(self, engine: Engine, adapters: dict[str, engine_pb2.Adapter]) -> None:
        """Update an engine's adapters before its own report, as the caller may use them at once."""
        if engine.address in self._pool:
            self._pool.link(engine.address).set_adapters(engine, adapters.values())


async def _for_each(engines: list[Engine], call: Callable[[Engine], Awaitable[None]]) -> None:
    """Call each engine; raise the first error after all calls have ended."""
    results = await asyncio.gather(*map(call, engines), return_exceptions=True)
    for engine, result in zip(engines, results, strict=True):
        if isinstance(result, grpc.aio.AioRpcError):
            message = result.details() or result.code().name
            if len(engines) > 1:
                message = f"{engine.address}: {message}"
            raise rpc.RpcError(result.code(), message) from result
        if isinstance(result, BaseException):
            raise result


def _not_loaded(name: str) -> rpc.RpcError:
    return rpc.not_found("name", f"no engine has an adapter {name[:128]!r}")
