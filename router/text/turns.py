"""Fair scheduling of work on texts and images among tenants, a few jobs at a time."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from octavo.common import background, rpc
from octavo.router.tenants.tenant import Tenant

_Result = TypeVar("_Result")

RETRY_SECONDS = 1.0
"""Retry delay in seconds for a tenant with too much waiting work."""


class Turns:
    """Gives the next free slot to the least served tenant, by size and weight.

    An idle tenant gains no credit: on return, it counts as served like the waiting ones. One slot
    never runs long jobs, so that short ones do not wait for them.

    Args:
        places: Number of concurrent jobs, at least two.
        long_size: Size above which a job is long.
        max_waiting: Maximum total size of a tenant's waiting jobs.
    """

    def __init__(self, places: int, long_size: int, max_waiting: int) -> None:
        self._free = places
        self._long_free = places - 1
        self._long_size = long_size
        self._max_waiting = max_waiting
        # The waiting jobs: each one's future, size and tenant's weight.
        self._waiting: dict[str, dict[asyncio.Future[None], tuple[int, float]]] = {}
        self._had: dict[str, float] = {}  # service per active tenant
        self._level = 0.0  # service of the last turn's tenant before it

    async def run(
        self, tenant: Tenant, size: int, work: Callable[[], Coroutine[Any, Any, _Result]], name: str
    ) -> _Result:
        """Do work in a turn, which ends with the work, even if the caller was cancelled before.

        Args:
            tenant: Tenant of the job.
            size: Cost of the job, in the same unit for all jobs.
            work: Makes the work's coroutine.
            name: Name of the work's task.

        Raises:
            rpc.RpcError: See `take`.
        """
        await self.take(tenant, size)

        def end(done: asyncio.Task[_Result]) -> None:
            self.give_back(size)
            if not done.cancelled():
                done.exception()  # retrieve it, as the caller may be gone

        job = background.start(work(), name)
        job.add_done_callback(end)
        return await asyncio.shield(job)

    async def take(self, tenant: Tenant, size: int) -> None:
        """Wait for a turn; the caller must return it with `give_back`.

        Args:
            tenant: Tenant of the job.
            size: Cost of the job, in the same unit for all jobs.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if the tenant has too much waiting work.
        """
        begun = asyncio.get_running_loop().create_future()
        self._add(tenant, size, begun)
        self._begin()
        try:
            await begun
        except asyncio.CancelledError:
            if begun.done() and not begun.cancelled():
                self.give_back(size)
            else:
                self._remove(tenant.name, begun)
            raise

    def give_back(self, size: int) -> None:
        """End the turn of a job of this size."""
        self._free += 1
        self._long_free += size > self._long_size
        self._begin()

    def _add(self, tenant: Tenant, size: int, begun: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(tenant.name)
        if waiting and sum(each for each, _ in waiting.values()) + size > self._max_waiting:
            raise rpc.exhausted(
                "too much of the tenant's text waits for tokenization; retry in "
                f"{RETRY_SECONDS:g} s",
                RETRY_SECONDS,
            )
        if waiting is None:
            self._had[tenant.name] = max(self._had.get(tenant.name, 0.0), self._level)
            waiting = self._waiting[tenant.name] = {}
        waiting[begun] = size, tenant.weight

    def _remove(self, name: str, begun: asyncio.Future[None]) -> tuple[int, float]:
        removed = self._waiting[name].pop(begun)
        if not self._waiting[name]:
            del self._waiting[name]
        return removed

    def _begin(self) -> None:
        """Start jobs while slots are free: the least served tenant's first one."""
        while self._free:
            firsts = {name: first for name in self._waiting if (first := self._first(name))}
            if not firsts:
                return
            name = min(firsts, key=self._had.__getitem__)
            size, weight = self._remove(name, firsts[name])
            self._free -= 1
            self._long_free -= size > self._long_size
            self._level = self._had[name]
            self._had[name] += size / weight
            self._forget()
            firsts[name].set_result(None)

    def _first(self, name: str) -> asyncio.Future[None] | None:
        """Return a tenant's first job that may start in a free slot.

        One whose caller was cancelled stays in the queue until its `take` runs again.
        """
        waiting = self._waiting[name].items()
        most = math.inf if self._long_free else self._long_size
        ready = (begun for begun, (size, _) in waiting if size <= most and not begun.cancelled())
        return next(ready, None)

    def _forget(self) -> None:
        """Forget tenants without waiting jobs that are not ahead of the others."""
        self._had = {
            name: had
            for name, had in self._had.items()
            if name in self._waiting or had > self._level
        }
