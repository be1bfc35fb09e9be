"""What compiled code depends on of the machine it is for."""

import platform
from pathlib import Path


def cpu_identity() -> str:
    """Returns what tells this CPU's instruction set from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
