"""What parts of the benchmark tell."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was timed.

    Attributes:
        case: What.
        seconds: The median of its runs.
        moved: Bytes that it must move at least, or none that count.
        flops: Floating-point operations that it must do, or none that count.
        error: Greatest difference from another implementation, relative to the
            greatest number; none where there is no other.
        peers: Seconds of other implementations of the same.
        notes: Remarks, such as the peers that could not be timed.
    """

    case: str
    seconds: float
    moved: int = 0
    flops: float = 0.0
    error: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
