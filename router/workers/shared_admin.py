"""AdminService of a router with several workers: it applies each change to all of them."""

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
"""Timeout in seconds of a call that needs no engine."""
ADAPTER_SECONDS = 5.0
"""Timeout in seconds until all workers know from the engines which adapters they have."""
LOOK_SECONDS = 0.02
"""Seconds between two checks whether all workers know."""


class SharedAdminService(admin_pb2_grpc.AdminServiceServicer):
    """Passes each call to the workers, and keeps what a restarted one has to know.

    Args:
        members: The workers.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._changes = EngineChanges()
        # One change after the other, or workers could have them in different orders.
        self._changing = asyncio.Lock()

    async def join(self, slot: WorkerSlot) -> None:
        """Connect a worker to the engines that there are now; it is called from then on.

        Raises:
            grpc.aio.AioRpcError: It does not answer.
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
        """Add an engine, or let a drained one take requests again."""
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
        """Give an engine no new requests."""
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

    # Engines hold the adapters: one worker asks them to load one, and they tell the other workers.

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
        """List the adapters that connected engines have."""
        return await self._one(_list_adapters)

    async def _until_known(self, name: str, addresses: set[str]) -> None:
        """Wait until all workers know which engines have an adapter: requests may follow at once.

        One that does not hear of it in time hears of it later; it refuses the requests until then.
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
        log.warning("not every worker knows of an adapter's change yet", adapter=name)

    async def _one(self, call: Callable[[Member], Awaitable[R]]) -> R:
        """Call the worker with the lowest number and return its response.

        Raises:
            rpc.RpcError: What the worker answered; UNAVAILABLE if there is none.
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
        """Call all workers at once and return the responses, of which there is one at least.

        A worker that ended meanwhile is left out: it is started again, and gets the changes then.

        Args:
            call: Calls one.
            done: The error of those that need no change, if others do.
            changed: Called if any of them is changed now, even if others fail.

        Raises:
            rpc.RpcError: The first error; UNAVAILABLE if there is no worker.
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
        """Drop recorded drains and removals of engines that DNS has listed again since."""
        try:
            lists = await self._all(
                lambda m: m.admin.ListEngines(admin_pb2.ListEnginesRequest(), timeout=CALL_SECONDS)
            )
        except rpc.RpcError:
            return  # nobody knows better
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
