"""AdminService of a router with several workers: applies each change to all of them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import grpc
import grpc.aio
import structlog

from octavo.common import rpc
from octavo.router.engines.changes import EngineChanges
from octavo.router.workers import wire
from octavo.router.workers.engine_status import merged_lists, merged_status
from octavo.router.workers.members import Member, Members
from octavo.router.workers.worker_slot import WorkerSlot
from octavo.v1 import admin_pb2, admin_pb2_grpc

log = structlog.get_logger(__name__)

R = TypeVar("R")

CALL_SECONDS = 5.0
"""Timeout in seconds of a call that does not involve engines."""
ADAPTER_SECONDS = 5.0
"""Timeout in seconds until engines have reported their adapters to all workers."""
NO_MODELS = "a router with workers loads no models: use `octavo serve --models`"
LOOK_SECONDS = 0.02
"""Seconds between two checks of the workers' adapters."""


class SharedAdminService(admin_pb2_grpc.AdminServiceServicer):
    """Forward each call to the workers, and record changes for restarted ones.

    Args:
        members: The workers.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._changes = EngineChanges()
        # One change at a time, so that all workers apply changes in the same order.
        self._changing = asyncio.Lock()

    async def join(self, slot: WorkerSlot) -> None:
        """Connect a worker to the current engines, and call it from then on.

        Raises:
            grpc.aio.AioRpcError: The worker does not answer.
        """
        async with self._changing:
            await self._drop_outdated_changes()
            member = self._members.add(slot)
            await wire.call(member.channel, "Connect", self._changes.to_json(), CALL_SECONDS)

    async def ListEngines(
        self, request: admin_pb2.ListEnginesRequest, context: rpc.Context
    ) -> admin_pb2.ListEnginesResponse:
        """List every engine with its state."""
        lists = await self._all(lambda m: m.admin.ListEngines(request, timeout=CALL_SECONDS))
        return admin_pb2.ListEnginesResponse(engines=merged_lists(each.engines for each in lists))

    async def AddEngine(
        self, request: admin_pb2.AddEngineRequest, context: rpc.Context
    ) -> admin_pb2.AddEngineResponse:
        """Add an engine, or make a drained one accept requests again."""
        async with self._changing:
            responses = await self._all(
                lambda m: m.admin.AddEngine(request, timeout=CALL_SECONDS),
                done=grpc.StatusCode.ALREADY_EXISTS,
                changed=lambda: self._changes.add(request.address),
            )
        log.info("engine added", engine=request.address)
        return admin_pb2.AddEngineResponse(engine=merged_status(r.engine for r in responses))

    async def DrainEngine(
        self, request: admin_pb2.DrainEngineRequest, context: rpc.Context
    ) -> admin_pb2.DrainEngineResponse:
        """Drain an engine: it gets no new requests."""
        async with self._changing:
            responses = await self._all(
                lambda m: m.admin.DrainEngine(request, timeout=CALL_SECONDS),
                done=grpc.StatusCode.NOT_FOUND,
                changed=lambda: self._changes.drain(request.address),
            )
        log.info("engine drained", engine=request.address)
        return admin_pb2.DrainEngineResponse(engine=merged_status(r.engine for r in responses))

    async def RemoveEngine(
        self, request: admin_pb2.RemoveEngineRequest, context: rpc.Context
    ) -> admin_pb2.RemoveEngineResponse:
        """Remove an engine; its requests migrate to others."""
        async with self._changing:
            await self._all(
                lambda m: m.admin.RemoveEngine(request, timeout=CALL_SECONDS),
                done=grpc.StatusCode.NOT_FOUND,
                changed=lambda: self._changes.remove(request.address),
            )
        log.info("engine removed", engine=request.address)
        return admin_pb2.RemoveEngineResponse()

    # Adapters are in the engines: one worker has an engine load one, which informs all workers.

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: rpc.Context
    ) -> admin_pb2.LoadAdapterResponse:
        """Load an adapter on one engine, or on all."""
        timeout = context.time_remaining()
        response = await self._one(lambda m: m.admin.LoadAdapter(request, timeout=timeout))
        await self._until_known(request.name, set(response.adapter.addresses))
        return response

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: rpc.Context
    ) -> admin_pb2.UnloadAdapterResponse:
        """Unload an adapter from one engine, or from all."""
        timeout = context.time_remaining()
        response = await self._one(lambda m: m.admin.UnloadAdapter(request, timeout=timeout))
        listed = await self._one(_list_adapters)
        having = {a for each in listed.adapters if _is(each, request.name) for a in each.addresses}
        await self._until_known(request.name, having)
        return response

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: rpc.Context
    ) -> admin_pb2.ListAdaptersResponse:
        """List the adapters of connected engines."""
        return await self._one(_list_adapters)

    async def LoadModel(
        self, request: admin_pb2.LoadModelRequest, context: rpc.Context
    ) -> admin_pb2.LoadModelResponse:
        """Refuse the call: a router with workers loads no models."""
        raise rpc.not_found("model", NO_MODELS)

    async def UnloadModel(
        self, request: admin_pb2.UnloadModelRequest, context: rpc.Context
    ) -> admin_pb2.UnloadModelResponse:
        """Refuse the call: a router with workers loads no models."""
        raise rpc.not_found("model", NO_MODELS)

    async def _until_known(self, name: str, addresses: set[str]) -> None:
        """Wait until all workers know an adapter's engines, as requests may follow at once.

        After the timeout, a late worker refuses these requests until the engines inform it.
        """
        give_up = time.monotonic() + ADAPTER_SECONDS
        while time.monotonic() < give_up:
            lists = await self._all(_list_adapters)
            known = [
                {a for each in listed.adapters if _is(each, name) for a in each.addresses}
                for listed in lists
            ]
            if all(each == addresses for each in known):
                return
            await asyncio.sleep(LOOK_SECONDS)
        log.warning("some workers do not know an adapter's change yet", adapter=name)

    async def _one(self, call: Callable[[Member], Awaitable[R]]) -> R:
        """Call the worker with the lowest number and return its response.

        Raises:
            rpc.RpcError: The worker's error; UNAVAILABLE if there are no workers.
        """
        for member in self._members:
            try:
                return await call(member)
            except grpc.aio.AioRpcError as error:
                raise rpc.RpcError.from_call(error) from error
        raise _none()

    async def _all(
        self,
        call: Callable[[Member], Awaitable[R]],
        *,
        done: grpc.StatusCode | None = None,
        changed: Callable[[], None] | None = None,
    ) -> Sequence[R]:
        """Call all workers concurrently, and return at least one response.

        Ended workers are skipped: they get the changes when restarted.

        Args:
            call: Calls one worker.
            done: Error status of workers that already have the change; ignored if others change.
            changed: Called if any worker changed, even if others failed.

        Raises:
            rpc.RpcError: The first error; UNAVAILABLE if there are no workers.
        """
        results = await asyncio.gather(*map(call, self._members), return_exceptions=True)
        responses = [result for result in results if not isinstance(result, BaseException)]
        errors = [result for result in results if isinstance(result, BaseException)]
        if responses and changed is not None:
            changed()
        harmless = {done, grpc.StatusCode.UNAVAILABLE} if responses else set()
        for error in sorted(errors, key=_is_unavailable):
            if not isinstance(error, grpc.aio.AioRpcError):
                raise error
            if error.code() not in harmless:
                raise rpc.RpcError.from_call(error) from error
        if not responses:
            raise _none()
        return responses

    async def _drop_outdated_changes(self) -> None:
        """Drop recorded drains and removals of engines that DNS has listed again."""
        try:
            lists = await self._all(
                lambda m: m.admin.ListEngines(admin_pb2.ListEnginesRequest(), timeout=CALL_SECONDS)
            )
        except rpc.RpcError:
            return  # keep the recorded changes
        engines = merged_lists(each.engines for each in lists)
        self._changes.removed -= {engine.address for engine in engines}
        self._changes.drained -= _addresses(engines, admin_pb2.ENGINE_STATE_SERVING)


def _addresses(engines: Iterable[admin_pb2.EngineStatus], state: int) -> set[str]:
    return {engine.address for engine in engines if engine.state == state}


def _is(status: admin_pb2.AdapterStatus, name: str) -> bool:
    return status.adapter.name == name


def _list_adapters(member: Member) -> Awaitable[admin_pb2.ListAdaptersResponse]:
    return member.admin.ListAdapters(admin_pb2.ListAdaptersRequest(), timeout=CALL_SECONDS)


def _is_unavailable(error: BaseException) -> bool:
    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
    return code is grpc.StatusCode.UNAVAILABLE


def _none() -> rpc.RpcError:
    return rpc.unavailable("no worker of the router is up; retry when one is", retry_after=1.0)
