"""Removes from the cache what no version needs any more: old kernels, and older versions' steps.

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
"""Folder in the cache of the steps that older versions compiled, of hundreds of megabytes each."""
DAY = 86_400.0
MAX_IDLE = 30 * DAY
"""Kernels that were not loaded for this long are removed."""
VERSIONS = 2
"""Kernels to keep: the current ones and those before."""
GRACE = DAY
"""Kernels and steps used within this time are kept, as several versions may take turns."""


def prune() -> None:
    """Remove old kernels that no process has loaded, and steps that older versions compiled."""
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
    """Return when a file was loaded or written; 0 if it is gone."""
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _remove(library: Path) -> None:
    """Remove kernels unless a process has them loaded."""
    with suppress(OSError), library.open("rb") as file:  # fails if it is locked or gone
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        library.unlink()
        log.info("old kernels removed", path=str(library))
