"""Decides which connections to close when too many are open."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from octavo.router.tenants.quota import Bucket, Clock

UNKNOWN_PER_SECOND = 20.0
"""Requests per second without a valid key that an address may send undelayed."""
UNKNOWN_AT_ONCE = 100.0
"""Burst of such requests that an address may send after a pause."""
MAX_HOLD_SECONDS = 0.25
"""Maximum delay in seconds; short, as clients behind a proxy share one connection."""
MAX_ADDRESSES = 1024
"""Maximum number of addresses tracked; addresses without delay are dropped first."""


class LimitedConnection(Protocol):
    """The interface of a connection that `OpenConnections` needs."""

    address: str
    known: bool

    def abort(self) -> None:
        """Close the connection at once."""


class OpenConnections:
    """The connections of one server.

    A new connection beyond the limit replaces one that waits for its client's request: the oldest
    of the address with the most connections that never sent a valid key. So an attacker cannot keep
    others out, with one address or many: honest clients send their request right after they
    connect.

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
        """Add a connection, closing another if necessary; return whether it may stay."""
        peers = self._open.get(connection.address, set())
        if self._max_per_peer and len(peers) >= self._max_per_peer:
            candidates = self._unknown.get(connection.address) or (
                c for c in self._idle if c in peers
            )
            if not self._evict(candidates):
                return False
        elif self._count >= self._max_open:
            # If all are busy, one connection more is kept for now: the server answers it with 503.
            crowd = max(self._unknown.values(), key=len, default=self._idle)
            self._evict(crowd)
        self._open.setdefault(connection.address, set()).add(connection)
        self._count += 1
        self.wait(connection)
        return True

    def wait(self, connection: LimitedConnection) -> None:
        """Record that a connection waits for its client."""
        self.work(connection)
        if connection.known:
            self._idle[connection] = None
        else:
            self._unknown.setdefault(connection.address, OrderedDict())[connection] = None

    def work(self, connection: LimitedConnection) -> None:
        """Record that a connection's request is being processed."""
        self._idle.pop(connection, None)
        waiting = self._unknown.get(connection.address)
        if waiting is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._unknown[connection.address]

    def leave(self, connection: LimitedConnection) -> None:
        """Remove a closed connection."""
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
    """Rate limit of one address's requests without a valid key.

    Args:
        clock: Monotonic clock in seconds.
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
        if bucket.level > -UNKNOWN_AT_ONCE:  # limits the debt to seconds of delay
            bucket.take(1)
        return min(bucket.seconds_until(0), MAX_HOLD_SECONDS)

    def _forget(self) -> None:
        if len(self._buckets) < MAX_ADDRESSES:
            return
        self._buckets = {a: b for a, b in self._buckets.items() if b.level < UNKNOWN_AT_ONCE}
        while len(self._buckets) >= MAX_ADDRESSES:
            del self._buckets[next(iter(self._buckets))]
