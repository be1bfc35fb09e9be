"""Loads the C++ kernels: those of the wheel for this CPU, or those compiled on this machine.

Python calls them through a plain C ABI, and they call PyTorch through its C ABI.
"""

import ctypes
import logging
import platform
from pathlib import Path

from octavo.kernels import cpu_target
from octavo.kernels.cpu.build import load, load_compiled
from octavo.kernels.cpu.instruction_sets import supported_sets

PREBUILT = Path(__file__).parent / "prebuilt"
"""Libraries in a wheel, by instruction set; see prebuild.py. An editable install has none."""
log = logging.getLogger(__name__)


def load_library() -> ctypes.CDLL:
    """Return the kernels for this machine.

    A wheel has one library for each of several instruction sets: the best that this CPU has
    is loaded. Without any, or if OCTAVO_MARCH names a CPU, they are compiled for this machine.

    Raises:
        OSError: See `load_compiled`.
    """
    if cpu_target.march() is None:
        for isa in supported_sets(platform.machine(), cpu_target.cpu_features()):
            path = PREBUILT / f"{isa.name}.so"
            if path.exists():
                try:
                    return load(path)
                except OSError as error:  # such as an older C library or another PyTorch
                    log.warning("the wheel's CPU kernels cannot be loaded: %s", error)
                    break
    return load_compiled()
