"""Removes old compiled steps and old builds of the kernels from the cache.

Each version of a model, of a library or of this code adds some. A step has hundreds of megabytes.
"""

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import structlog

from octavo.common.models import cache as model_cache
from octavo.kernels.cpu.build import LIBRARY

log = structlog.get_logger(__name__)

FOLDER = "compiled"
"""Folder of compiled steps in the cache."""
USE = "use.json"
"""File in a compiled step's directory: its contents are the recipe, its time is the last load, and
processes that have the step loaded hold a lock on it."""
DAY = 86_400.0
MAX_IDLE = 30 * DAY
"""Steps that were not loaded for this long are removed."""
VERSIONS = 2
"""Steps to keep per recipe: the current one and the one before."""
GRACE = DAY
"""Steps loaded within this time are kept, as several versions may take turns."""


def hold(directory: Path, made_of: Mapping[str, Any]) -> IO[bytes] | None:
    """Record that a compiled step is loaded now, and lock it against removal.

    Args:
        directory: The step's directory.
        made_of: Its recipe, by which `prune` finds newer versions.

    Returns:
        A file that holds the lock until it is closed; None if the cache cannot be written, so that
        nothing can be removed either.
    """
    with suppress(OSError):
        file = os.fdopen(os.open(directory / USE, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        fcntl.flock(file, fcntl.LOCK_SH)
        # All holders write the same contents, in one call.
        os.pwrite(file.fileno(), json.dumps(made_of, sort_keys=True).encode(), 0)
        return file
    return None


def prune() -> None:
    """Remove compiled steps and kernels that are not needed any more, and unfinished ones.

    Those that some process has loaded or is making stay.
    """
    model_cache.remove_unfinished(FOLDER)
    for directory in _old(_steps()):
        _remove_step(directory)
    for library in _old(_libraries()):
        _remove_library(library)


def _old(found: Iterable[tuple[float, str, Path]]) -> Iterator[Path]:
    """Yield the paths to remove, of (last load, recipe, path)."""
    newer: Counter[str] = Counter()
    for used, made_of, path in sorted(found, reverse=True):
        newer[made_of] += 1
        idle = time.time() - used
        kept = made_of == "" or newer[made_of] <= VERSIONS
        if idle > MAX_IDLE or (idle > GRACE and not kept):
            yield path


def _steps() -> Iterator[tuple[float, str, Path]]:
    for directory in (model_cache.cache_dir() / FOLDER).glob("[!.]*/"):
        with suppress(OSError):
            use = directory / USE
            used = (use if use.exists() else directory).stat().st_mtime
            yield used, _made_of(directory), directory


def _made_of(directory: Path) -> str:
    """Return the recipe that `hold` wrote; empty if there is none."""
    with suppress(OSError):
        return (directory / USE).read_text()
    return ""


def _libraries() -> Iterator[tuple[float, str, Path]]:
    for library in model_cache.cache_dir().glob(LIBRARY.format("*")):
        with suppress(OSError):
            yield library.stat().st_mtime, "kernels", library


def _remove_step(directory: Path) -> None:
    """Remove it unless a process has it loaded."""
    with suppress(OSError), (directory / USE).open("ab") as file:  # fails if it is locked or gone
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if model_cache.remove(f"{FOLDER}/{directory.name}"):
            log.info("old compiled step removed", path=str(directory))


def _remove_library(library: Path) -> None:
    """Remove it unless a process has it loaded."""
    with suppress(OSError), library.open("rb") as file:  # fails if it is locked or gone
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        library.unlink()
        log.info("old kernels removed", path=str(library))
