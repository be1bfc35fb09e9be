"""Which compiled steps, and which builds of the kernels, stay in the cache.

Each version of a model, of a library or of this code makes some of its own. A step is hundreds of
megabytes.
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
"""In the cache."""
USE = "use.json"
"""In a compiled step's directory: what it is of, when it was loaded last (the file's time) and who
has it loaded now (the locks on it)."""
DAY = 86_400.0
UNUSED = 30 * DAY
"""How long one is kept that is not loaded any more."""
VERSIONS = 2
"""How many are kept of one recipe: one to use, one to go back to."""
GRACE = DAY
"""What was loaded since is kept in any case: several versions may take turns."""


def hold(directory: Path, made_of: Mapping[str, Any]) -> IO[bytes] | None:
    """Notes that a compiled step is loaded now, and keeps it.

    Args:
        directory: where it is.
        made_of: its recipe, by which `prune` knows those that took its place.

    Returns:
        What keeps it until it is closed, as the process' end does too. None where nothing can be
        written, and so nothing be removed.
    """
    with suppress(OSError):
        file = os.fdopen(os.open(directory / USE, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        fcntl.flock(file, fcntl.LOCK_SH)
        # All who hold it write the same, in one call.
        os.pwrite(file.fileno(), json.dumps(made_of, sort_keys=True).encode(), 0)
        return file
    return None


def prune() -> None:
    """Removes compiled steps and kernels that are not needed any more, and what compilers left.

    What is loaded or being made, by whatever process, stays.
    """
    model_cache.remove_unfinished(FOLDER)
    for directory in _old(_steps()):
        _remove_step(directory)
    for library in _old(_libraries()):
        _remove_library(library)


def _old(found: Iterable[tuple[float, str, Path]]) -> Iterator[Path]:
    """Yields what goes of what is there: when each was loaded last, of what and where it is."""
    newer: Counter[str] = Counter()
    for used, made_of, path in sorted(found, reverse=True):
        newer[made_of] += 1
        idle = time.time() - used
        kept = made_of == "" or newer[made_of] <= VERSIONS
        if idle > UNUSED or (idle > GRACE and not kept):
            yield path


def _steps() -> Iterator[tuple[float, str, Path]]:
    for directory in (model_cache.cache_dir() / FOLDER).glob("[!.]*/"):
        with suppress(OSError):
            use = directory / USE
            used = (use if use.exists() else directory).stat().st_mtime
            yield used, _made_of(directory), directory


def _made_of(directory: Path) -> str:
    """What `hold` was told; empty if nothing."""
    with suppress(OSError):
        return (directory / USE).read_text()
    return ""


def _libraries() -> Iterator[tuple[float, str, Path]]:
    for library in model_cache.cache_dir().glob(LIBRARY.format("*")):
        with suppress(OSError):
            yield library.stat().st_mtime, "kernels", library


def _remove_step(directory: Path) -> None:
    """Removes one, unless somebody has it loaded."""
    with suppress(OSError), (directory / USE).open("ab") as file:  # or else it is held, or gone
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if model_cache.remove(f"{FOLDER}/{directory.name}"):
            log.info("an old compiled step was removed", path=str(directory))


def _remove_library(library: Path) -> None:
    """Removes one, unless somebody has it loaded."""
    with suppress(OSError), library.open("rb") as file:  # likewise
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        library.unlink()
        log.info("old kernels were removed", path=str(library))
