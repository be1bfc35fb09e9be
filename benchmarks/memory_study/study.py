"""Run what each of the paper's claims needs.

- Memory: a backlog of requests keeps each system full; its use of memory is averaged over time,
  from when a fifth of the requests are complete until none waits any more.
- Throughput: Poisson arrivals; the highest rate at which the mean normalised latency stays within
  LATENCY_BOUND, by bisection from the rate at which the system empties a backlog.
- Block sizes and sharing: as memory, in Octavo alone.

Jobs are independent and seeded, so they run in as many processes as there are cores, with the same
figures in any order.
"""

import gc
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
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

Found = dict[str, dict[str, Any]]
"""A job's summary by data set and by what was varied."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Requests of a memory run and simulated seconds of a throughput run, by data set."""

    backlog: dict[str, int]
    seconds: dict[str, float]
    seed: int = 0

    @classmethod
    def full(cls, seed: int = 0) -> "Scale":
        """Return the scale of the committed results."""
        names = [dataset.name for dataset in (*DATASETS, *PREFIXED)]
        backlog = dict(zip(names, (240, 1400, 1000, 800), strict=True))
        seconds = dict(zip(names, (400.0, 40.0, 15.0, 15.0), strict=True))
        return cls(backlog, seconds, seed)


class System(Protocol):
    """A simulated server."""

    def run(self, latency_bound: float | None = None) -> RunResult | None:
        """Serve the trace; return None once its latency must be over the bound."""


def make_system(name: str, trace: Trace, **settings: Any) -> System:  # noqa: ANN401
    """Return Octavo with PagedSystem's `settings`, or the baseline of that name."""
    if name == OCTAVO:
        return PagedSystem(trace, cost.NUM_SLOTS, **settings)
    return ContiguousSystem(trace, RESERVATIONS[name], cost.NUM_SLOTS)


def memory(
    dataset: Dataset,
    scale: Scale,
    system: str = OCTAVO,
    **settings: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """Return how a full system uses its memory; requests with several outputs are fewer."""
    count = scale.backlog[dataset.name]
    if dataset.num_outputs > 1:
        count = max(1, 2 * count // (2 + dataset.num_outputs))
    trace = traces.backlog(dataset, count, scale.seed)
    result = _complete(make_system(system, trace, **settings))
    return {**result.memory.shares(), "capacity": result.capacity, **result.extra}


def throughput(dataset: Dataset, scale: Scale, system: str) -> dict[str, Any]:
    """Return the highest rate within LATENCY_BOUND, and the rate at full load."""
    seconds, seed = scale.seconds[dataset.name], scale.seed
    count = max(1, scale.backlog[dataset.name] // 2)
    full = _complete(make_system(system, traces.backlog(dataset, count, seed)))

    def within(rate: float) -> bool:
        trace = traces.poisson(dataset, rate, seconds, seed)
        result = make_system(system, trace).run(LATENCY_BOUND)
        return result is not None and result.normalised_latency <= LATENCY_BOUND

    capacity = full.capacity or count / full.seconds
    return {"rate": highest(within, capacity), "capacity": capacity}


def highest(within: Callable[[float], bool], guess: float) -> float:
    """Return the highest rate that passes, to TOLERANCE, starting from a guess."""
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


@dataclass(slots=True)
class Study:
    """Everything that was found.

    Attributes:
        scale: How much was simulated.
        slots: KV memory of every system, in tokens.
        traces: The lengths that were drawn, by data set.
        memory: By data set and system.
        block_sizes: By data set and block size.
        throughput: By data set and system.
        sharing: By data set and outputs per request.
        beams: By data set and width of the search.
        prefixes: By data set and "cached" or "uncached".
    """

    scale: Scale
    slots: int
    traces: Found
    memory: Found
    block_sizes: Found
    throughput: Found
    sharing: Found
    beams: Found
    prefixes: Found

    def speedup(self, dataset: str, over: str) -> float:
        """Return Octavo's rate at the latency bound over another system's."""
        rates = self.throughput[dataset]
        return float(rates[OCTAVO]["rate"] / rates[over]["rate"])


Jobs = dict[str, dict[str, Future[dict[str, Any]]]]


def run_study(scale: Scale) -> Study:
    """Run every job, the longest first."""
    with ProcessPoolExecutor(os.cpu_count(), initializer=gc.disable) as pool:
        start = pool.submit

        rates: Jobs = {
            d.name: {name: start(throughput, d, scale, name) for name in (OCTAVO, *RESERVATIONS)}
            for d in DATASETS
        }
        rates |= {
            d.name: {n: start(throughput, d, scale, n) for n in (OCTAVO, "Orca (Oracle)")}
            for d in PREFIXED
        }
        sizes: Jobs = {
            d.name: {str(size): start(memory, d, scale, block_size=size) for size in BLOCK_SIZES}
            for d in DATASETS
        }
        shared: Jobs = {
            d.name: {str(n): start(memory, replace(d, n=n), scale) for n in SAMPLES}
            for d in DATASETS
        }
        beams: Jobs = {
            d.name: {str(w): start(memory, replace(d, beams=w), scale) for w in WIDTHS}
            for d in DATASETS
        }
        prefixes: Jobs = {
            d.name: {
                "cached": start(memory, d, scale, prefix_caching=True),
                "uncached": start(memory, d, scale, prefix_caching=False),
            }
            for d in PREFIXED
        }
        used: Jobs = {
            d.name: {name: start(memory, d, scale, name) for name in SYSTEMS} for d in DATASETS
        }
        lengths = {dataset.name: _lengths(dataset, scale) for dataset in (*DATASETS, *PREFIXED)}
        jobs = (used, sizes, rates, shared, beams, prefixes)
        return Study(scale, cost.NUM_SLOTS, lengths, *map(_gather, jobs))


def _gather(jobs: Jobs) -> Found:
    return {
        name: {key: future.result() for key, future in row.items()} for name, row in jobs.items()
    }


def _lengths(dataset: Dataset, scale: Scale) -> dict[str, float]:
    trace = traces.backlog(dataset, scale.backlog[dataset.name], scale.seed)
    return {
        "mean_prompt": float(trace.prompts.mean()),
        "mean_output": float(trace.outputs.mean()),
        "prompts_that_fill_a_block": float((trace.prompts >= 16).mean()),
        "requests": len(trace),
    }
