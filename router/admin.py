"""AdminService: adds and removes engines and adapters while the router runs."""

import structlog

from octavo.common import rpc
from octavo.common.adapter_names import check_adapter_name, check_adapter_path
from octavo.router.engines.adapters import PoolAdapters
from octavo.router.engines.link import EngineLink
from octavo.router.engines.pool import EnginePool
from octavo.router.on_demand import OnDemandModels
from octavo.router.settings import is_address
from octavo.v1 import admin_pb2, admin_pb2_grpc, engine_pb2

log = structlog.get_logger(__name__)


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Implement AdminService on a pool of engines.

    Args:
        pool: The engines.
        on_demand: Models that are loaded when requests name them, if any.
    """

    def __init__(self, pool: EnginePool, on_demand: OnDemandModels | None = None) -> None:
        self._pool = pool
        self._on_demand = on_demand
        self._adapters = PoolAdapters(pool)

    async def ListEngines(
        self, request: admin_pb2.ListEnginesRequest, context: rpc.Context
    ) -> admin_pb2.ListEnginesResponse:
        """List every engine with its state."""
        return admin_pb2.ListEnginesResponse(engines=map(_status, self._pool.links))

    async def AddEngine(
        self, request: admin_pb2.AddEngineRequest, context: rpc.Context
    ) -> admin_pb2.AddEngineResponse:
        """Add an engine, or make a drained one accept requests again."""
        if not is_address(request.address):
            raise rpc.invalid(
                "address", f"address must be HOST:PORT; got {request.address[:256]!r}"
            )
        link = self._pool.add(request.address)
        log.info("engine added", engine=request.address)
        return admin_pb2.AddEngineResponse(engine=_status(link))

    async def DrainEngine(
        self, request: admin_pb2.DrainEngineRequest, context: rpc.Context
    ) -> admin_pb2.DrainEngineResponse:
        """Drain an engine: it gets no new requests."""
        link = self._pool.drain(request.address)
        log.info("engine drained", engine=request.address)
        return admin_pb2.DrainEngineResponse(engine=_status(link))

    async def RemoveEngine(
        self, request: admin_pb2.RemoveEngineRequest, context: rpc.Context
    ) -> admin_pb2.RemoveEngineResponse:
        """Remove an engine; its requests migrate to others."""
        await self._pool.remove(request.address)
        log.info("engine removed", engine=request.address)
        return admin_pb2.RemoveEngineResponse()

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: rpc.Context
    ) -> admin_pb2.LoadAdapterResponse:
        """Load an adapter on one engine, or on all."""
        check_adapter_name(request.name)
        check_adapter_path(request.path)
        timeout = context.time_remaining()
        await self._adapters.load(request.name, request.path, request.address, timeout)
        log.info("adapter loaded", adapter=request.name, path=request.path)
        return admin_pb2.LoadAdapterResponse(adapter=self._adapters.status(request.name))

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: rpc.Context
    ) -> admin_pb2.UnloadAdapterResponse:
        """Unload an adapter from one engine, or from all."""
        await self._adapters.unload(request.name, request.address, context.time_remaining())
        log.info("adapter unloaded", adapter=request.name)
        return admin_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: rpc.Context
    ) -> admin_pb2.ListAdaptersResponse:
        """List the adapters of connected engines."""
        return admin_pb2.ListAdaptersResponse(adapters=self._adapters.loaded())

    async def LoadModel(
        self, request: admin_pb2.LoadModelRequest, context: rpc.Context
    ) -> admin_pb2.LoadModelResponse:
        """Load an offered model; wait until it is served."""
        model, on_demand = self._offered(request.model)
        async with on_demand.hold(model):
            return admin_pb2.LoadModelResponse(model=model)

    async def UnloadModel(
        self, request: admin_pb2.UnloadModelRequest, context: rpc.Context
    ) -> admin_pb2.UnloadModelResponse:
        """Unload an offered model once its requests are complete."""
        model, on_demand = self._offered(request.model)
        await on_demand.unload(model)
        return admin_pb2.UnloadModelResponse(model=model)

    def _offered(self, name: str) -> tuple[str, OnDemandModels]:
        """Return the model of a name or an alias, and what loads it.

        Raises:
            rpc.RpcError: NOT_FOUND if it is not offered.
        """
        model = self._pool.names_of(name)[0]
        if self._on_demand is None or model not in self._on_demand.offered():
            there = ", ".join(sorted(self._pool.offered)) or "none"
            raise rpc.not_found(
                "model", f"model {name[:128]!r} cannot be loaded or unloaded; there is: {there}"
            )
        return model, self._on_demand


def _status(link: EngineLink) -> admin_pb2.EngineStatus:
    engine = link.up
    state = admin_pb2.ENGINE_STATE_CONNECTING
    if engine is not None:
        state = admin_pb2.ENGINE_STATE_SERVING
        if link.taking is None:
            state = admin_pb2.ENGINE_STATE_DRAINING
    return admin_pb2.EngineStatus(
        address=link.address,
        state=state,
        model=engine.info.model if engine else "",
        sequences=link.sequences,
        load=engine.load if engine else None,
        problem=link.problem,
        threads=engine.info.threads if engine else 0,
        cpus=engine.info.cpus if engine else "",
        numa_nodes=engine.info.numa_nodes if engine else (),
        role=engine.info.role if engine else engine_pb2.ENGINE_ROLE_UNSPECIFIED,
    )
