"""The cache directory of prepared models: each is made once, whole or not at all."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
import structlog
from filelock import FileLock
from rich.console import Console

Stage = Callable[[str], None]
"""Says what is being done now."""

log = structlog.get_logger(__name__)


def cache_dir() -> Path:
    """Where prepared models are kept: OCTAVO_CACHE_DIR, else the user's cache."""
    override = os.environ.get("OCTAVO_CACHE_DIR")
    return Path(override).expanduser() if override else platformdirs.user_cache_path("octavo")


def prepare(name: str, make: Callable[[Path, Stage], None]) -> Path:
    """Returns the cached model `name`, making it first if need be.

    Several processes may ask at once: one works, the others wait. The directory
    appears whole or not at all.

    Args:
        name: of the model's directory in the cache; stands for all that its
            content depends on.
        make: gets the directory to write the model to, and what to tell its
            stages to. It may leave other files beside that directory: they are
            removed with its parent.

    Raises:
        Exception: what `make` raises.
    """
    target = cache_dir() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f"{target.name}.lock")):
        if target.is_dir():
            return target
        work = target.with_name(f".preparing-{target.name}")
        shutil.rmtree(work, ignore_errors=True)  # of one that was killed
        work.mkdir()
        try:
            with _progress() as stage:
                make(work / "model", stage)
            (work / "model").rename(target)
        finally:
            shutil.rmtree(work)
    log.info("model prepared", path=str(target))
    return target


@contextmanager
def _progress() -> Iterator[Stage]:
    """Yields a function that tells the stage: a spinner on a terminal, else a log line."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield log.info
        return
    with console.status("") as status:
        yield lambda text: status.update(f"{text}…")
