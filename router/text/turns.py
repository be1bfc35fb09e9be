"""Fair scheduling of tokenization between tenants, a few jobs at once."""

import asyncio

from octavo.common import rpc
from octavo.router.tenants.tenant import Tenant

RETRY_SECONDS = 1.0
"""Seconds to wait for a tenant with too much waiting work."""


class Turns:
    """Gives the next place to the tenant that was served the least, by size and weight.

    A tenant that comes back has had no less than those who wait: what it did not use is
    not kept. One place is never given to long work, so that what is short never waits
    for it.

    Args:
        places: Pieces of work that are done at once; at least two.
        long_size: Work that is larger is long.
        max_waiting: Maximum size of a tenant's work that waits.
    """

    def __init__(self, places: int, long_size: int, max_waiting: int) -> None:
        self._free = places
        self._long_free = places - 1
        self._long_size = long_size
        self._max_waiting = max_waiting
        # What ends the waiting of each piece of work, with its size and its tenant's weight.
        self._waiting: dict[str, dict[asyncio.Future[None], tuple[int, float]]] = {}
        self._had: dict[str, float] = {}  # of tenants with something waiting, and the last
        self._level = 0.0  # what the tenant of the last turn had before it

    async def take(self, tenant: Tenant, size: int) -> None:
        """Wait for a turn; the caller must give it back.

        Args:
            tenant: The tenant that the work is for.
            size: Its cost, in a unit that all have in common.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if too much of the tenant's waits already.
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
        """End a turn for work of this size."""
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
        """Begin work while there are free places: of each tenant's first, the least served's."""
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
        """Return a tenant's first work that may begin where a place is free."""
        waiting = self._waiting[name].items()
        short = (begun for begun, (size, _) in waiting if size <= self._long_size)
        return next(iter(self._waiting[name])) if self._long_free else next(short, None)

    def _forget(self) -> None:
        """Forget tenants that are not behind and have no waiting work."""
        self._had = {
            name: had
            for name, had in self._had.items()
            if name in self._waiting or had > self._level
        }
