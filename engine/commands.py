"""Commands that sessions and the server send to the core."""

from dataclasses import dataclass

from octavo.engine.constraints.compiler import Outcome
from octavo.engine.scheduling.request import Request
from octavo.engine.scheduling.sequence import SequenceGroup


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request; its events follow."""

    request: Request


@dataclass(frozen=True, slots=True)
class Constrain:
    """Start a request whose constraint was compiled, or fail it by what came of that."""

    group: SequenceGroup
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Look again at what can be scheduled: a mask is ready that no step waited for."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a request, or one of its outputs; no more events of it follow.

    Attributes:
        session: the request's session.
        request_id: the request.
        index: the output; None for all of them.
    """

    session: int
    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Publish to a new session what the prefix cache holds."""

    session: int


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Stop all requests of a session."""

    session: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new requests from now on."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the core before its next step; requests that are left fail with UNAVAILABLE."""


Command = Submit | Constrain | WakeUp | Abort | OpenSession | CloseSession | Drain | Stop
