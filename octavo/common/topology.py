"""The machine's nodes, cores and memory that this process may use.

Linux describes the machine in sysfs; /proc/self/status has the process's part, after affinity and
its control group's cpuset. A CPU here is a hardware thread, with Linux's number.

Why no library: psutil counts all cores of the machine and knows no nodes, py-libnuma needs libnuma,
and pyhwloc needs Python 3.12 and a recent glibc.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from octavo.common.system_files import SYSTEM, read_text

FAST_SHARE = 0.5
"""Minimum capacity of a fast core, as a share of the fastest core's. ARM's little cores have about
a quarter, its middle cores three quarters."""
RECLAIMABLE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
"""Available part of a node's memory: free memory and page cache."""


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core.

    Attributes:
        cpus: Hardware threads that this process may use, in order.
        fast: Whether the core is not a slow core of a hybrid processor.
    """

    cpus: tuple[int, ...]
    fast: bool = True


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node: cores and their local memory.

    Attributes:
        number: Linux's number of the node.
        cores: Cores, in order of their CPUs.
        total: Bytes of memory; 0 if unknown.
        available: Bytes of free memory and page cache.
    """

    number: int
    cores: tuple[Core, ...]
    total: int = 0
    available: int = 0

    @property
    def fast_cores(self) -> tuple[Core, ...]:
        """Its fast cores."""
        return tuple(core for core in self.cores if core.fast)


def read_nodes(root: Path = SYSTEM) -> tuple[Node, ...]:
    """Return the nodes with cores and memory for this process, at least one.

    The cores of a node without memory belong to the nearest node with memory. Nodes without cores
    are omitted. If `root` does not describe a machine, return one node with every CPU as a core.
    """
    cores = _cores(root)
    memory = {number: _memory(root, number) for number in _memory_nodes(root)}
    memory = {number: sizes for number, sizes in memory.items() if sizes[0]}
    if not memory:
        return (_whole_machine(cores),)
    homes = _homes(root, memory)
    nearby: dict[int, list[Core]] = {}
    for core in cores:
        nearby.setdefault(homes.get(core.cpus[0], min(memory)), []).append(core)
    return tuple(Node(number, tuple(nearby[number]), *memory[number]) for number in sorted(nearby))


def parse_list(text: str) -> tuple[int, ...]:
    """Parse a list of numbers in Linux's form, such as "0-3,8"."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def format_list(numbers: Iterable[int]) -> str:
    """Format numbers as a list in Linux's form, such as "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _cores(root: Path) -> list[Core]:
    """Return the cores with online and allowed CPUs, ordered by first CPU."""
    allowed = _allowed_cpus(root)
    fast = _fast_cpus(root, allowed)
    left, cores = set(allowed), []
    for cpu in allowed:
        if cpu in left:
            cpus = tuple(sorted({cpu} | (left & set(_siblings(root, cpu)))))
            cores.append(Core(cpus, cpu in fast))
            left -= set(cpus)
    return cores


def _allowed_cpus(root: Path) -> list[int]:
    """Return the CPUs that this process may run on."""
    status = _status(root)
    if "Cpus_allowed_list" in status:
        # For an unrestricted process, the list includes offline CPUs.
        allowed = set(parse_list(status["Cpus_allowed_list"]))
        online = set(parse_list(read_text(root / "sys/devices/system/cpu/online")))
        return sorted(allowed & online or allowed)
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _siblings(root: Path, cpu: int) -> tuple[int, ...]:
    """Return the hardware threads of a CPU's core."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    # The second name is from Linux before 5.9.
    texts = (read_text(topology / name) for name in ("core_cpus_list", "thread_siblings_list"))
    return parse_list(next(filter(None, texts), ""))


def _fast_cpus(root: Path, cpus: Iterable[int]) -> set[int]:
    """Return the `cpus` on fast cores; all of them if the cores are alike."""
    kinds = set(parse_list(read_text(root / "sys/devices/cpu_core/cpus")))  # Intel's hybrids
    if fast := kinds & set(cpus):
        return fast
    texts = {cpu: read_text(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity") for cpu in cpus}
    capacities = {cpu: int(text) for cpu, text in texts.items() if text.isdigit()}
    if len(capacities) < len(texts):
        return set(texts)
    threshold = FAST_SHARE * max(capacities.values())
    return {cpu for cpu, capacity in capacities.items() if capacity >= threshold}


def _memory_nodes(root: Path) -> list[int]:
    """Return the nodes whose memory this process may use."""
    folder = root / "sys/devices/system/node"
    online = set(parse_list(read_text(folder / "online")))
    allowed = parse_list(_status(root).get("Mems_allowed_list", ""))
    return sorted(online & set(allowed) if allowed else online)


def _memory(root: Path, node: int) -> tuple[int, int]:
    """Return a node's total and available memory, in bytes."""
    lines = read_text(root / f"sys/devices/system/node/node{node}/meminfo").splitlines()
    kib = {line.split()[2].rstrip(":"): int(line.split()[3]) for line in lines}
    available = sum(kib.get(name, 0) for name in RECLAIMABLE)
    return kib.get("MemTotal", 0) << 10, available << 10


def _homes(root: Path, memory: Iterable[int]) -> dict[int, int]:
    """Return each CPU's nearest node among those in `memory`."""
    folder = root / "sys/devices/system/node"
    online = parse_list(read_text(folder / "online"))
    homes: dict[int, int] = {}
    for node in online:
        distances = map(int, read_text(folder / f"node{node}/distance").split())
        far = {**dict(zip(online, distances, strict=False)), node: 0}
        home = min(memory, key=lambda other: (far.get(other, math.inf), other))
        homes |= dict.fromkeys(parse_list(read_text(folder / f"node{node}/cpulist")), home)
    return homes


def _whole_machine(cores: Iterable[Core]) -> Node:
    """Return the only node of a machine that Linux does not describe."""
    machine = psutil.virtual_memory()
    return Node(0, tuple(cores), machine.total, machine.available)


def _status(root: Path) -> dict[str, str]:
    """Return Linux's status of this process, by field."""
    lines = (line.partition(":") for line in read_text(root / "proc/self/status").splitlines())
    return {name: value.strip() for name, _, value in lines}
