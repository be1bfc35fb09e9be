"""Runs `octavo` on a simulated machine of two NUMA nodes with one core each.

    python -m tests.integration.two_nodes FOLDER ARGUMENT...

Engines' processes import this module too, so they see the same machine.
"""

import os
import sys
from pathlib import Path

from octavo.common.resources import memory
from octavo.common.topology import read_nodes
from tests.common.machines import Machine

VARIABLE = "TWO_NODES_OF_A_TEST"


def make(folder: Path) -> None:
    """Describe the machine; its cores are two real CPUs."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    nodes = {0: (str(first), 64), 1: (str(second), 64)}
    machine = Machine((str(first), str(second)), nodes, allowed=None, memory_allowed=None)
    machine.write(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
    os.environ[VARIABLE] = sys.argv.pop(1)

for function in (read_nodes, memory):
    function.__defaults__ = (Path(os.environ[VARIABLE]),)

if __name__ == "__main__":
    from octavo.cli import app

    sys.argv[0] = "octavo"
    app()
