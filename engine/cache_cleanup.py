"""Removes unneeded files from the cache: old kernels, and older versions' compiled steps.

Each version of PyTorch, of the compiler or of this code adds a build of the kernels.
"""

import fcntl
import shutil
import time
from contextlib import suppress
from pathlib import Path

import structlog

from octavo.common.models.cache import cache_dir
from octavo.kernels.cpu.build import LIBRARY

log = structlog.get_logger(__name__)

STEPS = "compiled"
"""Cache folder of older versions' compiled steps, hundreds of megabytes each."""
DAY = 86_400.0
MAX_IDLE = 30 * DAY
"""Seconds without a load after which kernels are removed."""
VERSIONS = 2
"""Number of builds to keep: the current and the previous one."""
GRACE = DAY
"""Seconds since the last use within which kernels and steps are kept, as versions may alternate."""


def prune() -> None:
    """Remove old kernels that no process has loaded, and older versions' compiled steps."""
    libraries = sorted(cache_dir().glob(LIBRARY.format("*")), key=_used, reverse=True)
    for newer, library in enumerate(libraries):
        idle = time.time() - _used(library)
        if idle > MAX_IDLE or (idle > GRACE and newer >= VERSIONS):
            _remove(library)
    steps = cache_dir() / STEPS
    if steps.exists() and time.time() - max(map(_used, steps.rglob("*")), default=0) > GRACE:
        shutil.rmtree(steps, ignore_errors=True)
        log.info("compiled steps of an older version removed", path=str(steps))


def _used(file: Path) -> float:
    """Return the time of a file's last load or write; 0 if it is gone."""
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _remove(library: Path) -> None:
    """Remove kernels unless a process has them loaded."""
    with suppress(OSError), library.open("rb") as file:  # fails if it is locked or gone
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        library.unlink()
        log.info("old kernels removed", path=str(library))
