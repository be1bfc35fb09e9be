"""Which connections give way to a new one, and which wait."""

from octavo.router.http.connection_limits import (
    MAX_ADDRESSES,
    MAX_HOLD_SECONDS,
    UNKNOWN_AT_ONCE,
    UNKNOWN_PER_SECOND,
    AnonymousPace,
    OpenConnections,
)


class Peer:
    def __init__(
        self,
        connections: OpenConnections,
        address: str,
        *,
        known: bool = False,
        works: bool = False,
    ):
        self.address = address
        self.known = known
        self.open = True
        self.stays = connections.enter(self)
        if works:
            connections.work(self)

    def abort(self) -> None:
        self.open = False


def test_the_address_with_most_unknown_connections_loses_its_oldest():
    connections = OpenConnections(6, 0)
    (alone,) = [Peer(connections, "a")]
    known = [Peer(connections, "b", known=True) for _ in range(2)]
    crowd = [Peer(connections, "b") for _ in range(3)]
    more = [Peer(connections, "c") for _ in range(2)]
    assert [peer.open for peer in crowd] == [False, False, True]
    assert all(peer.open for peer in (alone, *known, *more))
    last = [Peer(connections, address, works=True) for address in "dddd"]
    assert not any(peer.open for peer in (alone, *crowd, *more)), "before any that is known"
    assert all(peer.open for peer in (*known, *last))
    assert [Peer(connections, "d", works=True).open for _ in range(3)] == [True] * 3
    assert not any(peer.open for peer in known)


def test_a_connection_with_a_request_is_never_closed_for_another():
    connections = OpenConnections(2, 0)
    working = [Peer(connections, "a", works=True) for _ in range(2)]
    beyond = Peer(connections, "a")
    assert beyond.stays, "to be told that there is no room"
    assert Peer(connections, "a").stays
    assert not beyond.open
    assert all(peer.open for peer in working)


def test_connections_per_address_are_limited():
    connections = OpenConnections(100, 2)
    first, second = Peer(connections, "a", works=True), Peer(connections, "a", works=True)
    assert not Peer(connections, "a").stays
    assert Peer(connections, "b").stays
    connections.leave(first)
    third = Peer(connections, "a")
    assert third.stays
    assert Peer(connections, "a").stays
    assert not third.open
    assert second.open


def test_unknown_callers_are_rate_limited():
    now = [0.0]
    pace = AnonymousPace(lambda: now[0])
    assert [pace.hold("a") for _ in range(int(UNKNOWN_AT_ONCE))] == [0.0] * int(UNKNOWN_AT_ONCE)
    assert 0 < pace.hold("a") <= 1 / UNKNOWN_PER_SECOND
    for _ in range(10_000):
        assert pace.hold("a") <= MAX_HOLD_SECONDS
    assert pace.hold("b") == 0.0
    now[0] = 2 * UNKNOWN_AT_ONCE / UNKNOWN_PER_SECOND
    assert pace.hold("a") == 0.0


def test_the_number_of_addresses_is_bounded():
    now = [0.0]
    pace = AnonymousPace(lambda: now[0])
    for i in range(3 * MAX_ADDRESSES):
        pace.hold(str(i))
        now[0] += 0.01
    assert len(pace._buckets) <= MAX_ADDRESSES
