"""The nodes, cores and memory of this machine that this process may use.

Linux describes the machine in sysfs. What the process' affinity and its control group's cpuset
leave of it is in /proc/self/status. A CPU here is a hardware thread, as Linux numbers them.

psutil counts the cores of the machine, whatever this process may use, and knows no nodes.
py-libnuma needs libnuma, and pyhwloc Python 3.12 and a recent glibc.
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
"""What programs can get of a node's memory: free memory and the page cache."""


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core.

    Attributes:
        cpus: Its hardware threads that this process may use, in order.
        fast: Whether it is not one of a hybrid processor's slow cores.
    """

    cpus: tuple[int, ...]
    fast: bool = True


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node: cores and the memory that is near them.

    Attributes:
        number: Linux's number of the node.
        cores: Its cores, in order of their CPUs.
        total: Bytes of its memory; 0 if unknown.
        available: Bytes of it that are free or page cache.
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
    """Return the nodes that have cores and memory for this process: at least one.

    The cores of a node without memory belong to the nearest node with memory. Nodes with memory
    alone are left out. If `root` does not describe a machine, one node has every CPU as a core.
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
    """Return the numbers of a list as Linux writes it, such as "0-3,8"."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def format_list(numbers: Iterable[int]) -> str:
    """Return numbers as Linux writes a list of them, such as "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _cores(root: Path) -> list[Core]:
    """Return the cores with CPUs that are online and allowed, by their first CPU."""
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
        # For a process that was never restricted, the list has CPUs that are offline.
        allowed = set(parse_list(status["Cpus_allowed_list"]))
        online = set(parse_list(read_text(root / "sys/devices/system/cpu/online")))
        return sorted(allowed & online or allowed)
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _siblings(root: Path, cpu: int) -> tuple[int, ...]:
    """Return the hardware threads of a CPU's core."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    # The second name is that of Linux before 5.9.
    texts = (read_text(topology / name) for name in ("core_cpus_list", "thread_siblings_list"))
    return parse_list(next(filter(None, texts), ""))


def _fast_cpus(root: Path, cpus: Iterable[int]) -> set[int]:
    """Return those of `cpus` that are on fast cores; all of them if they are alike."""
    kinds = set(parse_list(read_text(root / "sys/devices/cpu_core/cpus")))  # of Intel's hybrids
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
    """Return a node's memory and how much of it is available, in bytes."""
    lines = read_text(root / f"sys/devices/system/node/node{node}/meminfo").splitlines()
    kib = {line.split()[2].rstrip(":"): int(line.split()[3]) for line in lines}
    available = sum(kib.get(name, 0) for name in RECLAIMABLE)
    return kib.get("MemTotal", 0) << 10, available << 10


def _homes(root: Path, memory: Iterable[int]) -> dict[int, int]:
    """Return the nearest of the nodes in `memory` for each CPU that a node has."""
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
