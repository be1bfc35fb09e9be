"""Which runs answer which claim.

- Memory: a backlog of requests keeps each system full; how its memory is used
  is averaged over time, from when a fifth of the requests are complete until
  none waits any more.
- Throughput: Poisson arrivals; the highest rate at which the mean normalised
  latency stays within LATENCY_BOUND, by bisection from the rate at which the
  system empties a backlog. Every system gets the same simulated time.
- Block sizes and sharing: as memory, in Octavo alone.

Each job is independent and seeded, so they run in as many processes as there
are cores, with the same figures in any order.
"""

import gc
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from benchmarks.memory_study import cost, traces
from benchmarks.memory_study.contiguous import RESERVATIONS, ContiguousSystem
from benchmarks.memory_study.measure import RunResult
from benchmarks.memory_study.paged import PagedSystem
from benchmarks.memory_study.paper import LATENCY_BOUND
from benchmarks.memory_study.traces import Dataset, Trace

OCTAVO = "Octavo"
SYSTEMS = (*RESERVATIONS, OCTAVO)
DATASETS = (traces.SHAREGPT, traces.ALPACA)
PREFIXED = (traces.ONE_SHOT, traces.FIVE_SHOT)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SAMPLES = (2, 4, 6)
WIDTHS = (2, 4, 6)

TOLERANCE = 0.03
"""How far the rate found may be below the highest one, relative to it."""

PLOTTED = (0.5, 0.75, 0.9)
"""Shares of the rate found whose latencies are looked at too, for the plots."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is simulated.

    Attributes:
        backlog: requests of a memory run, by data set.
        seconds: simulated time of a throughput run, by data set.
        seed: what traces are drawn with.
    """

    backlog: dict[str, int]
    seconds: dict[str, float]
    seed: int = 0

    @classmethod
    def full(cls, seed: int = 0) -> "Scale":
        """What the committed results were made with: under four minutes on 2 cores."""
        names = [dataset.name for dataset in (*DATASETS, *PREFIXED)]
        backlog = dict(zip(names, (240, 1400, 1000, 800), strict=True))
        seconds = dict(zip(names, (400.0, 40.0, 15.0, 15.0), strict=True))
        return cls(backlog, seconds, seed)

    def shrunk(self, factor: float) -> "Scale":
        """The same with that share of the requests and of the time."""
        return replace(
            self,
            backlog={name: max(1, int(n * factor)) for name, n in self.backlog.items()},
            seconds={name: seconds * factor for name, seconds in self.seconds.items()},
        )


class System(Protocol):
    """What serves a trace."""

    def run(self, latency_bound: float | None = None) -> RunResult | None:
        """Serves it; None where its latency is bound to be over the bound."""


def make_system(name: str, trace: Trace) -> System:
    """Octavo at its default settings, or the baseline of that name."""
    if name == OCTAVO:
        return PagedSystem(trace, cost.NUM_SLOTS)
    return ContiguousSystem(trace, RESERVATIONS[name], cost.NUM_SLOTS)


# Jobs; each gives what the JSON file holds of it.


def memory(dataset: Dataset, system: str, scale: Scale) -> dict[str, Any]:
    """How a full system uses its memory."""
    trace = traces.backlog(dataset, scale.backlog[dataset.name], scale.seed)
    return _summary(_complete(make_system(system, trace)))


def block_size(dataset: Dataset, size: int, scale: Scale) -> dict[str, Any]:
    """How Octavo uses its memory with blocks of another size."""
    trace = traces.backlog(dataset, scale.backlog[dataset.name], scale.seed)
    return _summary(_complete(PagedSystem(trace, cost.NUM_SLOTS, block_size=size)))


def sharing(dataset: Dataset, n: int, scale: Scale) -> dict[str, Any]:
    """What `n` outputs of each prompt save by holding the prompt's blocks together."""
    count = max(1, 2 * scale.backlog[dataset.name] // (2 + n))
    trace = traces.backlog(replace(dataset, n=n), count, scale.seed)
    return _summary(_complete(PagedSystem(trace, cost.NUM_SLOTS)))


def beam_sharing(dataset: Dataset, width: int, scale: Scale) -> dict[str, Any]:
    """What the beams of one search save by holding together what they have in common."""
    count = max(1, 2 * scale.backlog[dataset.name] // (2 + width))
    trace = traces.backlog(replace(dataset, beams=width), count, scale.seed)
    return _summary(_complete(PagedSystem(trace, cost.NUM_SLOTS)))


def prefix(dataset: Dataset, scale: Scale, *, caching: bool) -> dict[str, Any]:
    """What a prefix that all prompts have costs, with the prefix cache and without."""
    trace = traces.backlog(dataset, scale.backlog[dataset.name], scale.seed)
    return _summary(_complete(PagedSystem(trace, cost.NUM_SLOTS, prefix_caching=caching)))


def throughput(dataset: Dataset, system: str, scale: Scale) -> dict[str, Any]:
    """The highest rate within LATENCY_BOUND, and the latencies of the rates tried."""
    seconds, seed = scale.seconds[dataset.name], scale.seed
    count = max(1, scale.backlog[dataset.name] // 2)
    full = _complete(make_system(system, traces.backlog(dataset, count, seed)))
    points: dict[float, float] = {}

    def within(rate: float) -> bool:
        trace = traces.poisson(dataset, rate, seconds, seed)
        result = make_system(system, trace).run(LATENCY_BOUND)
        if result is None or result.normalised_latency > LATENCY_BOUND:
            return False
        points[rate] = result.normalised_latency
        return True

    capacity = full.capacity or count / full.seconds
    rate = highest(within, capacity)
    for share in PLOTTED:
        within(share * rate)
    return {"rate": rate, "capacity": capacity, "points": sorted(points.items())}


def highest(within: Callable[[float], bool], guess: float) -> float:
    """The highest rate that passes, to TOLERANCE, starting from a guess."""
    low, high = guess, guess
    while not within(low):
        high, low = low, low * 0.9
    while high <= low:
        high = low * 1.1
        if within(high):
            low = high
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        if within(middle):
            low = middle
        else:
            high = middle
    return low


def _complete(system: System) -> RunResult:
    result = system.run()
    assert result is not None, "a run without a bound goes to its end"
    return result


def _summary(result: RunResult) -> dict[str, Any]:
    return {**result.memory.shares(), "capacity": result.capacity, **result.extra}


# All of it.


@dataclass(slots=True)
class Study:
    """Everything that was found, by what it was found for.

    Attributes:
        scale: how much was simulated.
        slots: KV memory of every system, in tokens.
        traces: the lengths that were drawn, by data set.
        memory: by data set, then system.
        block_sizes: by data set, then block size.
        throughput: by data set, then system.
        sharing: by data set, then outputs per request.
        beams: by data set, then width of the search.
        prefixes: by data set, then "cached" and "uncached".
    """

    scale: Scale
    slots: int
    traces: dict[str, dict[str, float]]
    memory: dict[str, dict[str, Any]]
    block_sizes: dict[str, dict[str, Any]]
    throughput: dict[str, dict[str, Any]]
    sharing: dict[str, dict[str, Any]]
    beams: dict[str, dict[str, Any]]
    prefixes: dict[str, dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return asdict(self)

    def speedup(self, dataset: str, over: str) -> float:
        """Octavo's rate at the latency bound over another system's."""
        rates = self.throughput[dataset]
        return float(rates[OCTAVO]["rate"] / rates[over]["rate"])


_Table = dict[str, dict[str, "Future[dict[str, Any]]"]]


def run_study(scale: Scale) -> Study:
    """Runs every job, the longest first."""
    with ProcessPoolExecutor(os.cpu_count(), initializer=gc.disable) as pool:
        rates: _Table = {
            dataset.name: {
                system: pool.submit(throughput, dataset, system, scale)
                for system in (OCTAVO, *RESERVATIONS)
                if dataset in DATASETS or system in (OCTAVO, "Orca (Oracle)")
            }
            for dataset in (*DATASETS, *PREFIXED)
        }
        sizes: _Table = {
            dataset.name: {
                str(size): pool.submit(block_size, dataset, size, scale) for size in BLOCK_SIZES
            }
            for dataset in DATASETS
        }
        shared: _Table = {
            dataset.name: {str(n): pool.submit(sharing, dataset, n, scale) for n in SAMPLES}
            for dataset in DATASETS
        }
        beams: _Table = {
            dataset.name: {
                str(width): pool.submit(beam_sharing, dataset, width, scale) for width in WIDTHS
            }
            for dataset in DATASETS
        }
        prefixes: _Table = {
            dataset.name: {
                "cached": pool.submit(prefix, dataset, scale, caching=True),
                "uncached": pool.submit(prefix, dataset, scale, caching=False),
            }
            for dataset in PREFIXED
        }
        used: _Table = {
            dataset.name: {
                system: pool.submit(memory, dataset, system, scale) for system in SYSTEMS
            }
            for dataset in DATASETS
        }
        lengths = {dataset.name: _lengths(dataset, scale) for dataset in (*DATASETS, *PREFIXED)}
        return Study(
            scale,
            cost.NUM_SLOTS,
            lengths,
            _gather(used),
            _gather(sizes),
            _gather(rates),
            _gather(shared),
            _gather(beams),
            _gather(prefixes),
        )


def _gather(table: _Table) -> dict[str, dict[str, Any]]:
    return {
        name: {key: future.result() for key, future in row.items()} for name, row in table.items()
    }


def _lengths(dataset: Dataset, scale: Scale) -> dict[str, float]:
    trace = traces.backlog(dataset, scale.backlog[dataset.name], scale.seed)
    return {
        "mean_prompt": float(trace.prompts.mean()),
        "mean_output": float(trace.outputs.mean()),
        "prompts_that_fill_a_block": float((trace.prompts >= 16).mean()),
        "requests": len(trace),
    }
