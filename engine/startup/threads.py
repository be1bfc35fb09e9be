"""The number of compute threads on a CPU, and the cores that they are pinned to.

There is one thread per physical core, as a core's hardware threads share its arithmetic units. A
step has hundreds of parallel loops, each of which waits for its slowest thread. So threads on slow
cores, threads that share a core and threads beyond a CPU quota would slow all others.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import structlog
import torch

from octavo.common import resources
from octavo.common.topology import Core, Node, format_list, read_nodes
from octavo.engine.parallel.place import RankPlace

log = structlog.get_logger(__name__)

THREAD_VARIABLES = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
"""Environment variables that set PyTorch's number of threads."""
AFFINITY_VARIABLES = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
"""Environment variables that make OpenMP pin threads itself."""
MANY_CORES = 8
"""Minimum number of cores at which one is left to the event loop, the router and Linux. These need
part of a core, and whenever they interrupt a compute thread, all others wait."""

ROUNDED_UP = 0.25
"""Maximum part of a core by which a quota is rounded up to whole cores. With more threads than the
quota allows, all wait for a throttled one. In steps of small layers, two threads were 0.97 times as
fast as one under a quota of 1.5 cores, and 1.16 times under 1.9."""

Places = tuple[tuple[int, ...], ...]
"""The CPUs that each thread runs on."""


@dataclass(frozen=True, slots=True)
class Threads:
    """The compute threads.

    Attributes:
        count: Number of threads.
        places: The CPUs that each thread is pinned to; empty: not pinned.
        cpus: All CPUs that this process may use.
        nodes: The NUMA nodes of these CPUs.
    """

    count: int
    places: Places
    cpus: tuple[int, ...]
    nodes: tuple[int, ...]


def set_threads(place: RankPlace | None = None) -> Threads:
    """Set PyTorch's compute threads for this process' cores; return them.

    Args:
        place: The place of this rank among several that divide the machine's cores.
    """
    nodes, quota = read_nodes(), resources.cpu_quota()
    if place is not None:
        nodes, quota = place.share_of(nodes), quota / place.local_size
    threads = choose_threads(nodes, quota, os.environ, torch.get_num_threads())
    if threads.count != torch.get_num_threads():
        torch.set_num_threads(threads.count)
    log.info(
        "threads chosen",
        threads=threads.count,
        cpus=format_list(threads.cpus),
        numa_nodes=format_list(threads.nodes),
    )
    return threads


def choose_threads(
    nodes: tuple[Node, ...], quota: float, environment: Mapping[str, str], torch_threads: int
) -> Threads:
    """Return the threads for the cores of `nodes`.

    Threads are pinned only if they use all cores, or all but the spare one: two processes with
    fewer threads would both pin them to the same cores.

    Args:
        nodes: The nodes, with the cores that this process may use.
        quota: The CPU quota of this process, in cores; infinite without a limit.
        environment: The environment variables.
        torch_threads: The number of PyTorch's threads with these variables.
    """
    cores = [core for node in nodes for core in node.cores]
    fast = [core for core in cores if core.fast]
    cpus = tuple(sorted(cpu for core in cores for cpu in core.cpus))
    limited = max(1, math.floor(min(len(fast), quota + ROUNDED_UP)))
    spare = _spare(limited, idle=limited == len(fast) and len(cpus) > len(fast))
    count = torch_threads if THREAD_VARIABLES & environment.keys() else limited - spare
    places: Places = ()
    if limited == len(fast) and not AFFINITY_VARIABLES & environment.keys():
        places = _places(fast, spare, count)
    return Threads(count, places, cpus, tuple(node.number for node in nodes))


def _spare(cores: int, *, idle: bool) -> int:
    """Return the number of cores left to threads that do not compute.

    Args:
        cores: Number of cores that may be used.
        idle: Whether there are slow cores or second hardware threads, which suffice for them.
    """
    return int(cores >= MANY_CORES and not idle)


def _places(fast: list[Core], spare: int, count: int) -> Places:
    """Return the CPUs that each of `count` threads is pinned to; empty if they are not pinned.

    A thread gets all hardware threads of its core: Linux moves it to the other one when it needs
    the first. The spare core is the first, where Linux does most of its own work.
    """
    if count == 1 or count not in {len(fast), len(fast) - spare}:
        return ()
    return tuple(core.cpus for core in fast[len(fast) - count :])
