"""Fair scheduling of tokenization between tenants, a few jobs at once."""

import asyncio
from collections import deque
from dataclasses import dataclass

from octavo.common import rpc
from octavo.router.tenants.tenant import Tenant

RETRY_SECONDS = 1.0
"""Seconds to wait for a tenant with too much waiting work."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One piece of work, waiting or begun.

    Attributes:
        tenant: The tenant that it is for.
        size: Its cost, in a unit that all have in common.
        long: Whether it is larger than `long_size`.
        begun: Done when it may begin.
    """

    tenant: Tenant
    size: int
    long: bool
    begun: asyncio.Future[None]


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
        self._waiting: dict[str, deque[Turn]] = {}
        self._had: dict[str, float] = {}  # of tenants with something waiting, and the last
        self._level = 0.0  # what the tenant of the last turn had before it

    async def take(self, tenant: Tenant, size: int) -> Turn:
        """Wait for a turn; the caller must give it back.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if too much of the tenant's waits already.
        """
        turn = Turn(
            tenant, size, size > self._long_size, asyncio.get_running_loop().create_future()
        )
        self._add(turn)
        self._begin()
        try:
            await turn.begun
        except asyncio.CancelledError:
            if turn.begun.done() and not turn.begun.cancelled():
                self.give_back(turn)
            else:
                self._remove(turn)
            raise
        return turn

    def give_back(self, turn: Turn) -> None:
        """End a turn."""
        self._free += 1
        self._long_free += turn.long
        self._begin()

    def _add(self, turn: Turn) -> None:
        name = turn.tenant.name
        waiting = self._waiting.get(name)
        if waiting and sum(t.size for t in waiting) + turn.size > self._max_waiting:
            raise rpc.exhausted(
                "too much of the tenant's text waits for tokenization; retry in "
                f"{RETRY_SECONDS:g} s",
                RETRY_SECONDS,
            )
        if waiting is None:
            self._had[name] = max(self._had.get(name, 0.0), self._level)
            waiting = self._waiting[name] = deque()
        waiting.append(turn)

    def _remove(self, turn: Turn) -> None:
        name = turn.tenant.name
        self._waiting[name].remove(turn)
        if not self._waiting[name]:
            del self._waiting[name]

    def _begin(self) -> None:
        """Begin work while there are free places."""
        while self._free and (turn := self._next()) is not None:
            self._remove(turn)
            name = turn.tenant.name
            self._free -= 1
            self._long_free -= turn.long
            self._level = self._had[name]
            self._had[name] += turn.size / turn.tenant.weight
            self._forget()
            turn.begun.set_result(None)

    def _next(self) -> Turn | None:
        """Return the next work: of the first of each tenant, that of the least served one."""
        firsts = filter(None, map(self._first, self._waiting.values()))
        return min(firsts, key=lambda turn: self._had[turn.tenant.name], default=None)

    def _first(self, waiting: deque[Turn]) -> Turn | None:
        return next((turn for turn in waiting if self._long_free or not turn.long), None)

    def _forget(self) -> None:
        """Forget tenants that are not behind and have no waiting work."""
        self._had = {
            name: had
            for name, had in self._had.items()
            if name in self._waiting or had > self._level
        }
