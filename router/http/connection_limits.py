"""Which connections are closed when there are too many."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from octavo.router.tenants.quota import Bucket, Clock

UNKNOWN_PER_SECOND = 20.0
"""Requests per second without a valid key that one address may send without delay."""
UNKNOWN_AT_ONCE = 100.0
"""Such requests that an address may send at once after a pause."""
MAX_HOLD_SECONDS = 0.25
"""Maximum delay: behind a proxy, callers with a key may share the connection."""
MAX_ADDRESSES = 1024
"""Maximum addresses whose requests are counted; those that need no delay are dropped first."""


class LimitedConnection(Protocol):
    """The part of a connection that `OpenConnections` uses."""

    address: str
    known: bool

    def abort(self) -> None:
        """Close it at once."""


class OpenConnections:
    """The connections of one server.

    When a connection comes and there is no place, one that waits for its client to send
    a request is closed: first of those that never sent a valid key, from the address that
    has most of them, the oldest. So neither many addresses nor one can keep others out, as
    an honest client sends its request as soon as it is connected.

    Args:
        max_open: Maximum open connections.
        max_per_peer: Maximum open connections of one address; 0 is no limit.
    """

    def __init__(self, max_open: int, max_per_peer: int) -> None:
        self._max_open = max_open
        self._max_per_peer = max_per_peer
        self._open: dict[str, set[LimitedConnection]] = {}
        self._count = 0
        self._unknown: dict[str, OrderedDict[LimitedConnection, None]] = {}
        self._idle: OrderedDict[LimitedConnection, None] = OrderedDict()

    def enter(self, connection: LimitedConnection) -> bool:
        """Count a connection and make room for it; return whether it may stay."""
        peers = self._open.get(connection.address, set())
        if self._max_per_peer and len(peers) >= self._max_per_peer:
            candidates = self._unknown.get(connection.address) or (
                c for c in self._idle if c in peers
            )
            if not self._evict(candidates):
                return False
        elif self._count >= self._max_open:
            # Where all work on requests, the server answers 503 to one connection more.
            crowd = max(self._unknown.values(), key=len, default=self._idle)
            self._evict(crowd)
        self._open.setdefault(connection.address, set()).add(connection)
        self._count += 1
        self.wait(connection)
        return True

    def wait(self, connection: LimitedConnection) -> None:
        """Record that a connection's client has to send something next."""
        self.work(connection)
        if connection.known:
            self._idle[connection] = None
        else:
            self._unknown.setdefault(connection.address, OrderedDict())[connection] = None

    def work(self, connection: LimitedConnection) -> None:
        """Record that a connection has a whole request, which is worked on."""
        self._idle.pop(connection, None)
        waiting = self._unknown.get(connection.address)
        if waiting is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._unknown[connection.address]

    def leave(self, connection: LimitedConnection) -> None:
        """Forget a connection that is closed."""
        self.work(connection)
        peers = self._open.get(connection.address, set())
        if connection in peers:
            peers.remove(connection)
            self._count -= 1
            if not peers:
                del self._open[connection.address]

    def _evict(self, candidates: Iterable[LimitedConnection]) -> bool:
        victim = next(iter(candidates), None)
        if victim is None:
            return False
        self.leave(victim)
        victim.abort()
        return True


class AnonymousPace:
    """The rate at which an address may send requests without a valid key.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = {} if clock is None else {"clock": clock}
        self._buckets: dict[str, Bucket] = {}

    def hold(self, address: str) -> float:
        """Count a request; return the seconds until the connection's next one is read."""
        bucket = self._buckets.get(address)
        if bucket is None:
            self._forget()
            bucket = Bucket(UNKNOWN_PER_SECOND, UNKNOWN_AT_ONCE, **self._clock)
            self._buckets[address] = bucket
        if bucket.level > -UNKNOWN_AT_ONCE:  # so that what is owed is paid in seconds
            bucket.take(1)
        return min(bucket.seconds_until(0), MAX_HOLD_SECONDS)

    def _forget(self) -> None:
        if len(self._buckets) < MAX_ADDRESSES:
            return
        self._buckets = {a: b for a, b in self._buckets.items() if b.level < UNKNOWN_AT_ONCE}
        while len(self._buckets) >= MAX_ADDRESSES:
            del self._buckets[next(iter(self._buckets))]
