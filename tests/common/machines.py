"""Simulated machines: files as in Linux's sysfs, to read instead of this machine's."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from octavo.common.topology import format_list, parse_list

GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """A machine, and its resources that a process may use.

    Attributes:
        cores: Each core's CPUs.
        nodes: Each node's CPUs and GiB of memory; a quarter is free and a quarter page cache.
        allowed: The CPUs that the process may use, regardless of its real affinity; default: all.
            None: by its affinity.
        memory_allowed: The nodes whose memory it may use; default: all.
        offline: CPUs that are not running.
        capacities: The cores' capacities by CPU, as on ARM.
        fast: The fast cores' CPUs, as on Intel's hybrids.
        distances: The distances between nodes; default: one socket each.
    """

    cores: Iterable[str]
    nodes: Mapping[int, tuple[str, int]]
    allowed: str | None = "0-1023"
    memory_allowed: str | None = "0-31"
    offline: str = ""
    capacities: Mapping[int, int] = field(default_factory=dict)
    fast: str = ""
    distances: Mapping[int, str] = field(default_factory=dict)

    def write(self, root: Path) -> Path:
        """Write its files under `root`; return `root`."""
        self._write_process(root)
        cpus = root / "sys/devices/system/cpu"
        offline = set(parse_list(self.offline))
        everything = {cpu for core in self.cores for cpu in parse_list(core)}
        _write(cpus / "online", format_list(everything - offline))
        for core in self.cores:
            for cpu in set(parse_list(core)) - offline:
                siblings = format_list(set(parse_list(core)) - offline)
                _write(cpus / f"cpu{cpu}/topology/core_cpus_list", siblings)
        for cpu, capacity in self.capacities.items():
            _write(cpus / f"cpu{cpu}/cpu_capacity", str(capacity))
        if self.fast:
            _write(root / "sys/devices/cpu_core/cpus", self.fast)
        self._write_nodes(root / "sys/devices/system/node", offline)
        return root

    def _write_process(self, root: Path) -> None:
        lists = {"Cpus_allowed_list": self.allowed, "Mems_allowed_list": self.memory_allowed}
        lines = (f"{name}:\t{numbers}\n" for name, numbers in lists.items() if numbers is not None)
        _write(root / "proc/self/status", "".join(lines))

    def _write_nodes(self, folder: Path, offline: set[int]) -> None:
        _write(folder / "online", format_list(self.nodes))
        for number, (cpus, gib) in self.nodes.items():
            alone = " ".join("10" if number == other else "20" for other in self.nodes)
            _write(folder / f"node{number}/cpulist", format_list(set(parse_list(cpus)) - offline))
            _write(folder / f"node{number}/distance", self.distances.get(number, alone))
            kib = gib << 20
            amounts = {"MemTotal": kib, "MemFree": kib // 4, "Inactive(file)": kib // 4}
            lines = (f"Node {number} {name}: {kib} kB\n" for name, kib in amounts.items())
            _write(folder / f"node{number}/meminfo", "".join(lines))


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n" if text else "\n")


def two_sockets(**changes: object) -> Machine:
    """Two sockets of 32 cores with two hardware threads each, numbered as Linux numbers them."""
    return Machine(
        **{
            "cores": tuple(f"{cpu},{cpu + 64}" for cpu in range(64)),
            "nodes": {0: ("0-31,64-95", 256), 1: ("32-63,96-127", 256)},
            **changes,
        }
    )


def one_node(cores: int, **changes: object) -> Machine:
    """One node of cores without second hardware threads, and 64 GiB."""
    nodes = {0: (f"0-{cores - 1}", 64)}
    return Machine(**{"cores": tuple(map(str, range(cores))), "nodes": nodes, **changes})
