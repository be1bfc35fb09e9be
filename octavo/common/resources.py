"""Memory and CPU time available to this process.

PyTorch and psutil report the whole machine's. Linux control groups, version 1 or 2, limit
containers: the limits of the process's group and all its parents apply.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from octavo.common.placement import current
from octavo.common.system_files import SYSTEM, read_text
from octavo.common.topology import read_nodes

LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Files with a group's limits, of either version. Above `high`, a group is slowed, not killed."""
USAGES = ("memory.current", "memory.usage_in_bytes")
INACTIVE = ("total_inactive_file", "inactive_file")
"""Key of the reclaimable page cache, which counts as used; version 1's second key omits child
groups."""

OOM_COUNTERS = ("memory.events", "memory.oom_control")
"""Files with a group's `oom_kill` counter, of versions 2 and 1."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Amounts of memory, in bytes.

    Attributes:
        total: The maximum for this process.
        available: Free now, without swapping or killing.
    """

    total: int
    available: int


def memory(root: Path = SYSTEM) -> Memory:
    """Return the machine's memory, within the limits of control groups.

    Engines on the same machine share it, and each has at most its share of its node's memory.
    """
    machine = psutil.virtual_memory()
    total, available = float(machine.total), float(machine.available)
    for group in _groups("memory", root):
        limit = min(_limit(read_text(group / name)) for name in LIMITS)
        if limit < math.inf:
            total, available = min(total, limit), min(available, limit - _used(group))
    if (placement := current()) is not None:
        total, available = total / placement.engines, available / placement.engines
        for node in read_nodes(root):
            if node.number == placement.node:
                total = min(total, node.total / placement.engines_on_node)
                available = min(available, node.available / placement.engines_on_node)
    return Memory(int(total), max(0, int(available)))


@dataclass(frozen=True, slots=True)
class OomKills:
    """Number of processes that the kernel has killed for lack of memory.

    Attributes:
        group: Kills in this process's control group; None if unknown.
        machine: Kills on the machine; None if unknown.
    """

    group: int | None
    machine: int | None

    def rose_since(self, before: "OomKills") -> bool | None:
        """Return whether the kernel has killed a process of this group since; None if unknown."""
        if self.group is not None and before.group is not None:
            return self.group > before.group
        if self.machine is not None and self.machine == before.machine:
            return False
        return None


def oom_kills(root: Path = SYSTEM) -> OomKills:
    """Return the kernel's counters of out-of-memory kills."""
    group = next(_groups("memory", root), None)
    texts = [] if group is None else [read_text(group / name) for name in OOM_COUNTERS]
    counters = [_counter(text) for text in texts]
    return OomKills(
        next((count for count in counters if count is not None), None),
        _counter(read_text(root / "proc/vmstat")),
    )


def _counter(text: str) -> int | None:
    """Return the value of `oom_kill` in a file of names and values."""
    values = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    return int(values["oom_kill"]) if "oom_kill" in values else None


def cpu_quota(root: Path = SYSTEM) -> float:
    """Return the CPU time that this process may use, in cores; infinite without a limit.

    Engines on the same machine share it.
    """
    placement = current()
    quota = min([_quota(group) for group in _groups("cpu", root)], default=math.inf)
    return quota if placement is None else quota / placement.engines


def _used(group: Path) -> int:
    """Return the bytes of a group's memory, except reclaimable page cache."""
    usage = next((int(text) for name in USAGES if (text := read_text(group / name))), 0)
    stat = dict(line.split() for line in read_text(group / "memory.stat").splitlines())
    return usage - next((int(stat[key]) for key in INACTIVE if key in stat), 0)


def _quota(group: Path) -> float:
    """Return a group's CPU quota, in cores."""
    if words := read_text(group / "cpu.max").split():
        quota, period = words
    else:
        quota, period = (read_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    limit = _limit(quota)
    return limit / int(period) if limit < math.inf else math.inf


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield this process's groups of `controller`, each before its parents."""
    homes: dict[str, Path] = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        homes.update(dict.fromkeys(names.split(","), Path(path)))
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        shown, point = mount.split()[3:5]
        system, _, options = kind.split(" ", 2)
        home = None
        if system == "cgroup2":
            home = homes.get("")
        elif system == "cgroup" and controller in options.split(","):
            home = homes.get(controller)
        if home is None:
            continue
        top = root / point.lstrip("/")
        # In a container, only the process's own group may be mounted.
        below = home.relative_to(shown) if home.is_relative_to(shown) else Path()
        yield top / below
        yield from (top / parent for parent in below.parents)


def _limit(text: str) -> float:
    """Parse a limit; `max`, -1 and an empty text mean infinity."""
    return float(text) if text.isdigit() else math.inf
