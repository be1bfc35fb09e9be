"""The results of the benchmark's parts."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one case.

    Attributes:
        case: Name of the case.
        seconds: The median of its runs.
        moved: Minimum bytes that the case must move; 0 if unknown.
        flops: Floating-point operations that the case needs; 0 if unknown.
        error: Greatest difference from another implementation, relative to the greatest value; None
            without another implementation.
        peers: Seconds of other implementations by name.
        notes: Remarks, such as peers that could not be timed.
    """

    case: str
    seconds: float
    moved: int = 0
    flops: float = 0.0
    error: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
