"""Fair scheduling of work on texts and images among tenants, a few jobs at a time."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from octavo.common import background, rpc
from octavo.router.tenants.tenant import Tenant

_Result = TypeVar("_Result")

RETRY_SECONDS = 1.0
"""Retry delay in seconds for a tenant with too much waiting work."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """Work that waits or runs.

    Attributes:
        work: Makes the work's coroutine.
        name: Name of the work's task.
        size: Cost of the work.
        weight: Weight of its tenant.
        result: What its caller waits for; cancelled when the caller leaves.
    """

    work: Callable[[], Coroutine[Any, Any, Any]]
    name: str
    size: int
    weight: float
    result: asyncio.Future[Any]


class Turns:
    """Gives the next free slot to the least served tenant, by size and weight.

    An idle tenant gains no credit: on return, it counts as served like the waiting ones. One slot
    never runs long jobs, so that short ones do not wait for them. A slot is taken by the task of a
    job, never by a caller, who may leave at any moment.

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
        self._waiting: dict[str, dict[_Job, None]] = {}  # in order of arrival, by tenant
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
            rpc.RpcError: RESOURCE_EXHAUSTED if the tenant has too much waiting work.
        """
        result: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        job = _Job(work, name, size, tenant.weight, result)
        self._add(tenant, job)
        self._begin()
        try:
            return await result
        except asyncio.CancelledError:
            if job in self._waiting.get(tenant.name, ()):
                self._remove(tenant.name, job)
            raise

    def _add(self, tenant: Tenant, job: _Job) -> None:
        waiting = self._waiting.get(tenant.name)
        if waiting and sum(each.size for each in waiting) + job.size > self._max_waiting:
            raise rpc.exhausted(
                f"too many of the tenant's texts or images wait; retry in {RETRY_SECONDS:g} s",
                RETRY_SECONDS,
            )
        if waiting is None:
            self._had[tenant.name] = max(self._had.get(tenant.name, 0.0), self._level)
            waiting = self._waiting[tenant.name] = {}
        waiting[job] = None

    def _remove(self, name: str, job: _Job) -> None:
        del self._waiting[name][job]
        if not self._waiting[name]:
            del self._waiting[name]

    def _begin(self) -> None:
        """Start jobs while slots are free: the least served tenant's first one."""
        while self._free:
            firsts = {name: first for name in self._waiting if (first := self._first(name))}
            if not firsts:
                return
            name = min(firsts, key=self._had.__getitem__)
            job = firsts[name]
            self._remove(name, job)
            self._level = self._had[name]
            self._had[name] += job.size / job.weight
            self._forget()
            self._free -= 1
            self._long_free -= job.size > self._long_size
            background.start(job.work(), job.name).add_done_callback(partial(self._end, job))

    def _first(self, name: str) -> _Job | None:
        """Return a tenant's first job that may start in a free slot.

        One whose caller was cancelled stays in the queue until its `run` goes on.
        """
        most = math.inf if self._long_free else self._long_size
        ready = (
            job for job in self._waiting[name] if job.size <= most and not job.result.cancelled()
        )
        return next(ready, None)

    def _end(self, job: _Job, done: asyncio.Task[Any]) -> None:
        """Free a job's slot, and tell its caller unless it has left."""
        self._free += 1
        self._long_free += job.size > self._long_size
        if done.cancelled():
            job.result.cancel()
        elif (error := done.exception()) is None:
            if not job.result.done():
                job.result.set_result(done.result())
        elif not job.result.done():
            job.result.set_exception(error)
        self._begin()

    def _forget(self) -> None:
        """Forget tenants without waiting jobs that are not ahead of the others."""
        self._had = {
            name: had
            for name, had in self._had.items()
            if name in self._waiting or had > self._level
        }
