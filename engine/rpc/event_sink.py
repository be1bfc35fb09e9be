"""The interface of sessions: receivers of the core's events."""

from typing import Protocol

from octavo.engine.events import PrefixChange, StepOutput
from octavo.v1 import engine_pb2


class EventSink(Protocol):
    """Receives the events of one session, in the event loop."""

    def add(self, output: StepOutput, load: engine_pb2.Load) -> None:
        """Take a step's events of this session, and the engine's load."""

    def add_prefixes(self, change: PrefixChange) -> None:
        """Take a change of the prefix cache; `add` of the same step follows."""

    def set_adapters(self, adapters: engine_pb2.Adapters) -> None:
        """Take all adapters that are loaded, whenever they change."""

    def close(self) -> None:
        """End after sending pending messages: the engine stops."""

    def fail(self) -> None:
        """End at once with INTERNAL: events were lost."""
