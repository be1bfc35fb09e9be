"""Decides how many engines `octavo serve` starts, and on which cores each runs.

Decoding is bound by memory bandwidth, and cores read another NUMA node's memory at a fraction of
their own's. So one engine per node, with its own copy of the weights, is faster than one engine for
all, if the weights fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from octavo.cli.running import StartError
from octavo.cli.serve_settings import Words
from octavo.common import resources
from octavo.common.models.gguf.reader import parts_of
from octavo.common.placement import Placement
from octavo.common.system_files import SYSTEM
from octavo.common.topology import Core, Node, read_nodes

log = structlog.get_logger(__name__)

GPU_FILES = ("dev/nvidiactl", "dev/dxg", "dev/kfd")
"""Device files of GPUs: NVIDIA's driver, Windows' Linux (WSL) and AMD's driver."""
WEIGHTS_SHARE = 1 / 3
"""Maximum share of an engine's memory for the model's files, for `auto` to start an engine per
node. Weights may use more memory than their files, and they are packed from a copy."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that decide the number of engines.

    Attributes:
        nodes: Nodes that this process may use.
        quota: CPU quota, in cores.
        memory: Bytes of memory that this process may use.
        weights: Bytes of the model's weights.
        on_gpu: Whether an engine would use a GPU.
    """

    nodes: Sequence[Node]
    quota: float
    memory: int
    weights: int
    on_gpu: bool


def read_machine(device: str, model: Path) -> Machine:
    """Return the facts about this machine.

    Args:
        device: The engines' --device.
        model: The model's directory, or its GGUF file.
    """
    return Machine(
        read_nodes(),
        resources.cpu_quota(),
        resources.memory().total,
        weights_bytes(model),
        has_gpu(device),
    )


def plan_engines(choice: Words | int, machine: Machine) -> list[Placement]:
    """Return the engines' placements; empty: one engine that uses everything available.

    If --engines-per-node is auto but this is not one engine per node, log the reason.

    Args:
        choice: Value of --engines-per-node.
        machine: Facts about the machine and the model.

    Raises:
        StartError: The machine is too small for the choice.
    """
    if choice == "off":
        return []
    if choice == "auto" and len(machine.nodes) > 1 and (reason := _against(machine)):
        log.info("one engine for all NUMA nodes", nodes=len(machine.nodes), reason=reason)
        return []
    count = 1 if choice == "auto" else choice
    parts = [(node, part) for node in machine.nodes for part in _divide(node, count)]
    if len(parts) == 1:
        return []
    if machine.on_gpu:
        raise StartError(
            f"--engines-per-node {choice} starts {len(parts)} engines, which need --device cpu:"
            " set it, or set --engines-per-node off to use the GPU"
        )
    return [
        Placement(
            tuple(sorted(cpu for core in part for cpu in core.cpus)),
            node.number,
            binds_memory=len(machine.nodes) > 1,
            engines=len(parts),
            engines_on_node=count,
        )
        for node, part in parts
    ]


def _against(machine: Machine) -> str:
    """Return why `auto` does not start an engine per node; empty if it does."""
    cores = sum(len(node.fast_cores) for node in machine.nodes)
    memory = min(machine.memory / len(machine.nodes), *(node.total for node in machine.nodes))
    if machine.on_gpu:
        return "there may be a GPU; set --device cpu if the engines run on the CPU"
    if machine.quota < cores:
        return f"the CPU quota is {machine.quota:g} of {cores} cores"
    if machine.weights > WEIGHTS_SHARE * memory:
        return "the weights are more than a third of a node's memory"
    return ""


def _divide(node: Node, count: int) -> list[Sequence[Core]]:
    """Divide a node's cores among engines: neighbouring ones, both fast and slow.

    Raises:
        StartError: There are more engines than fast cores.
    """
    fast = node.fast_cores
    slow = [core for core in node.cores if not core.fast]
    if count > len(fast):
        raise StartError(
            f"--engines-per-node is {count}, but node {node.number} allows at most {len(fast)}, one"
            " for each core that this process may use: lower it"
        )
    return [[*_share(fast, i, count), *_share(slow, i, count)] for i in range(count)]


def _share(cores: Sequence[Core], index: int, count: int) -> Sequence[Core]:
    """Return one of `count` shares of the cores, which differ by at most one core."""
    return cores[len(cores) * index // count : len(cores) * (index + 1) // count]


def has_gpu(device: str, root: Path = SYSTEM) -> bool:
    """Return whether an engine with this --device may use a GPU."""
    return device != "cpu" and (
        device != "auto" or any((root / name).exists() for name in GPU_FILES)
    )


def weights_bytes(model: Path) -> int:
    """Return the size of the weight files in a model's directory, or of a GGUF file."""
    files = parts_of(model) if model.is_file() else model.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
