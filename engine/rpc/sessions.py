"""The sessions of routers and gateways, which get the core's events."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count

import structlog

from octavo.engine.events import PrefixChange, StepOutput
from octavo.engine.rpc.event_sink import EventSink
from octavo.engine.rpc.session import Session
from octavo.v1 import engine_pb2

log = structlog.get_logger(__name__)

NO_EVENTS = StepOutput()


class Sessions:
    """The open sessions by number. All methods are called in the event loop."""

    def __init__(self) -> None:
        self._sessions: dict[int, EventSink] = {}
        self._ids = count()

    @property
    def of_routers(self) -> int:
        """Number of Octavo's routers."""
        return sum(isinstance(sink, Session) for sink in self._sessions.values())

    def attach(self, sink: EventSink) -> int:
        """Start a session that gets events by `sink`; return its number."""
        number = next(self._ids)
        self._sessions[number] = sink
        return number

    def detach(self, number: int) -> None:
        """Pass a session no more events."""
        del self._sessions[number]

    def announce_adapters(self, adapters: engine_pb2.Adapters) -> None:
        """Pass all loaded adapters to all sessions."""
        for session in self._sessions.values():
            session.set_adapters(adapters)

    def close(self) -> None:
        """End all sessions once they have sent the core's last events."""
        for session in self._sessions.values():
            session.close()

    def heartbeat(self, load: engine_pb2.Load) -> None:
        """Send the load to all sessions while a step runs."""
        self.add_events({}, (), load)

    def fail(self) -> None:
        """End all sessions: events were lost."""
        for session in self._sessions.values():
            session.fail()

    def add_events(
        self,
        outputs: Mapping[int, StepOutput],
        changes: Iterable[PrefixChange],
        load: engine_pb2.Load,
    ) -> None:
        """Pass each session its events, the changes of the prefix cache, and the load."""
        for number, session in self._sessions.items():
            with _isolated(session):
                for change in changes:
                    if change.session in {None, number}:
                        session.add_prefixes(change)
                session.add(outputs.get(number, NO_EVENTS), load)


@contextmanager
def _isolated(session: EventSink) -> Iterator[None]:
    """End a session that cannot process its events; the others continue."""
    try:
        yield
    except Exception:
        log.exception("events lost on their way to a session")
        session.fail()
