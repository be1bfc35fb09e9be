"""What admission is told of a request."""

from dataclasses import dataclass, field
from typing import Protocol

from octavo.common.priority import effective_arrival
from octavo.router.balancing.prompt import Prompt
from octavo.router.tenants.tenant import ANONYMOUS, Tenant


class Progress(Protocol):
    """What has come of a request so far, all engines that it had together."""

    @property
    def output_tokens(self) -> int:
        """Tokens drawn for all of its outputs."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each output once all have ended of themselves; empty until then."""

    @property
    def first_time(self) -> float | None:
        """When the first token came, by the monotonic clock."""

    @property
    def last_time(self) -> float:
        """When the newest token came."""


@dataclass(slots=True)
class NoProgress:
    """Progress of what makes none."""

    output_tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    first_time: float | None = None
    last_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request's claim to an engine.

    Attributes:
        model: Which engines will do.
        sequences: How many outputs it has that have not ended.
        priority: Each unit counts as `PRIORITY_SECONDS` of waiting.
        arrival: When it came, by the monotonic clock.
        prompt_tokens: Of its prompt.
        min_tokens: Fewest tokens of each output.
        max_tokens: Most tokens of each output.
        deadline: When its client gives up, by the monotonic clock; None for never.
        moved: Whether it had an engine and lost it. It is then not refused for
            a full queue, nor for how long it has waited or will take.
        avoid: The engine that failed on it; chosen only where there is no other.
        prompt: Its prompt, for policies that go by it.
        tenant: Whose it is.
        progress: What has come of it.
    """

    model: str
    sequences: int
    priority: int
    arrival: float
    prompt_tokens: int = 1
    min_tokens: int = 0
    max_tokens: int = 1
    deadline: float | None = None
    moved: bool = False
    avoid: object | None = None
    prompt: Prompt | None = None
    tenant: Tenant = ANONYMOUS
    progress: Progress = field(default_factory=NoProgress)

    @property
    def virtual_arrival(self) -> float:
        """Its place among its tenant's: first come first served, but for priority."""
        return effective_arrival(self.arrival, self.priority)
