"""Load and unload adapters while the engine serves."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import structlog

from octavo.common import rpc
from octavo.common.adapter_names import check_adapter_name, check_adapter_path
from octavo.common.background import call_in_thread
from octavo.common.thread_priority import lower_priority
from octavo.engine.lora.adapter import Adapter, AdapterRegistry
from octavo.engine.lora.errors import AdapterError
from octavo.v1 import engine_pb2

log = structlog.get_logger(__name__)


class AdapterService:
    """Loads and unloads the adapters of an engine's service.

    Args:
        registry: The adapters; None if the engine takes none.
        announce: Called with all adapters whenever they change.
        share: Makes other ranks read an adapter, between steps; None if there are none.
    """

    def __init__(
        self,
        registry: AdapterRegistry | None,
        announce: Callable[[engine_pb2.Adapters], None],
        share: Callable[[Adapter], Awaitable[None]] | None = None,
    ) -> None:
        self._registry = registry
        self._announce = announce
        self._share = share

    def find(self, name: str) -> Adapter | None:
        """Return the adapter of a name; None if there is none."""
        return None if self._registry is None else self._registry.find(name)

    def message(self) -> engine_pb2.Adapters:
        """Return all adapters."""
        return engine_pb2.Adapters(adapters=map(_to_message, self._registry or ()))

    async def load(self, name: str, path: str) -> engine_pb2.Adapter:
        """Load an adapter in a thread of low priority, beside the steps.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT, ALREADY_EXISTS or FAILED_PRECONDITION.
        """
        registry = self._taking()
        check_adapter_name(name)
        check_adapter_path(path)
        _check_free(registry, name)
        try:
            adapter = await call_in_thread(_read, registry, name, Path(path))
            if self._share is not None:
                await self._share(adapter)
        except AdapterError as error:
            log.warning("adapter refused", adapter=name, path=path, reason=str(error))
            raise rpc.invalid("path", str(error)) from error
        _check_free(registry, name)  # another call may have loaded it meanwhile
        registry.add(adapter)
        log.info("adapter loaded", adapter=name, path=path, digest=adapter.digest)
        self._announce(self.message())
        return _to_message(adapter)

    def unload(self, name: str) -> None:
        """Unload an adapter.

        Raises:
            rpc.RpcError: NOT_FOUND or FAILED_PRECONDITION.
        """
        if self._taking().remove(name) is None:
            raise rpc.not_found("name", f"adapter {name[:128]!r} is not loaded")
        log.info("adapter unloaded", adapter=name)
        self._announce(self.message())

    def _taking(self) -> AdapterRegistry:
        if self._registry is None:
            raise rpc.precondition(
                "name", "the engine takes no adapters: start it with --enable-lora or --lora"
            )
        return self._registry


def _read(registry: AdapterRegistry, name: str, path: Path) -> Adapter:
    lower_priority()
    return registry.read(name, path)


def _check_free(registry: AdapterRegistry, name: str) -> None:
    if name in registry:
        raise rpc.RpcError(
            grpc.StatusCode.ALREADY_EXISTS,
            f"a model {name!r} is loaded already: unload it first, or take another name",
            field="name",
        )


def _to_message(adapter: Adapter) -> engine_pb2.Adapter:
    return engine_pb2.Adapter(
        name=adapter.name,
        digest=adapter.digest,
        bytes=adapter.nbytes,
        max_rank=adapter.weights.max_rank,
    )
