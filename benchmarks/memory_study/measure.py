"""What a run counts: how memory was used, for how long, and how requests fared."""

from dataclasses import dataclass, field

WARM_UP = 0.2
"""Share of the requests that must be complete before memory is looked at."""


@dataclass(slots=True)
class MemoryUse:
    """KV memory over time, in slot-seconds, of the moments when requests waited for it.

    The parts of the paper's figure 2. Each system is at its fullest then, so what
    is not allocated is what it could not make use of.

    Attributes:
        useful: slots that hold a token's K/V, each counted once however many
            sequences share it.
        reserved: slots that their owner will fill later.
        internal: slots that their owner will never fill.
        rounding: slots added to a reservation to make it a buddy block.
        free: slots that nobody holds.
        logical: slots that sequences hold, counted once for each of them.
        requests: running requests.
        seconds: how long was looked at.
    """

    useful: float = 0.0
    reserved: float = 0.0
    internal: float = 0.0
    rounding: float = 0.0
    free: float = 0.0
    logical: float = 0.0
    requests: float = 0.0
    seconds: float = 0.0

    def add(self, seconds: float, sample: "MemoryUse") -> None:
        """Books a sample, in slots, that stood for `seconds`."""
        for name in self.__slots__:
            if name != "seconds":
                setattr(self, name, getattr(self, name) + seconds * getattr(sample, name))
        self.seconds += seconds

    @property
    def allocated(self) -> float:
        """Slots held or reserved."""
        return self.useful + self.reserved + self.internal + self.rounding

    @property
    def total(self) -> float:
        """All slots."""
        return self.allocated + self.free

    @property
    def external(self) -> float:
        """What the paper calls external fragmentation and others."""
        return self.rounding + self.free

    def shares(self) -> dict[str, float]:
        """The summary that is reported; empty where nothing was looked at."""
        if not self.seconds:
            return {}
        return {
            "useful_of_allocated": self.useful / self.allocated,
            "useful": self.useful / self.total,
            "reserved": self.reserved / self.total,
            "internal": self.internal / self.total,
            "external": self.external / self.total,
            "free": self.free / self.total,
            "saved_by_sharing": 1 - self.allocated / self.logical if self.logical else 0.0,
            "requests": self.requests / self.seconds,
        }


@dataclass(slots=True)
class RunResult:
    """What came of one trace in one system.

    Attributes:
        memory: how its memory was used while loaded.
        seconds: from the first arrival to the last completion.
        latencies: each request's latency divided by its output's length, in
            seconds per token (section 6.1's normalised latency).
        loaded_requests: requests completed while memory was looked at.
        loaded_seconds: for how long.
        extra: what else a system counts.
    """

    memory: MemoryUse = field(default_factory=MemoryUse)
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    loaded_requests: int = 0
    loaded_seconds: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def normalised_latency(self) -> float:
        """Mean seconds per output token."""
        return sum(self.latencies) / len(self.latencies)

    @property
    def capacity(self) -> float:
        """Requests completed a second while others waited."""
        return self.loaded_requests / self.loaded_seconds if self.loaded_seconds else 0.0


class Recorder:
    """Books completions and samples as a run goes on, and says when it is hopeless."""

    def __init__(self, count: int, latency_bound: float | None) -> None:
        self.result = RunResult()
        self._warm = int(WARM_UP * count)
        self._allowed = None if latency_bound is None else latency_bound * count
        self._latency = 0.0
        self._warm_since: tuple[int, float] | None = None

    @property
    def hopeless(self) -> bool:
        """Whether the mean latency is over the bound whatever is still to come."""
        return self._allowed is not None and self._latency > self._allowed

    def step(self, now: float, waiting: bool) -> bool:
        """Notes a step's end; returns whether its memory is to be looked at."""
        done = len(self.result.latencies)
        if not waiting or done < self._warm:
            return False
        if self._warm_since is None:
            self._warm_since = done, now
        else:
            self.result.loaded_requests = done - self._warm_since[0]
            self.result.loaded_seconds = now - self._warm_since[1]
        return True

    def complete(self, latency: float, output: int) -> None:
        """Books a completed request."""
        self.result.latencies.append(latency / output)
        self._latency += latency / output
