"""The cache directory of prepared models, to which models are added atomically."""

import errno
import multiprocessing
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
"""Reports the current stage of work."""

log = structlog.get_logger(__name__)

UNFINISHED = ".preparing-"
"""Prefix of temporary directories in which models are made."""
LOCK = ".lock"
"""Suffix of lock files."""


def cache_dir() -> Path:
    """Return the directory of prepared models: OCTAVO_CACHE_DIR, else the user's cache."""
    override = os.environ.get("OCTAVO_CACHE_DIR")
    return Path(override).expanduser() if override else platformdirs.user_cache_path("octavo")


def check_usable() -> None:
    """Check that the cache directory is writable, or already has content.

    Raises:
        OSError: It is not; the message says what to set.
    """
    directory = cache_dir()
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if os.access(directory, os.W_OK | os.X_OK) or any(directory.iterdir()):
            return
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise OSError(
            f"cannot write to the cache directory {directory} ({(error.strerror or '').lower()}); "
            "set OCTAVO_CACHE_DIR to a directory that this user may write"
        ) from None


def prepare(name: str, make: Callable[[Path, Stage], None]) -> Path:
    """Return the directory of the cached model `name`; call `make` first if it is missing.

    If several processes need it at once, one makes it and the others wait. `name` must identify
    everything that determines the content. `make` receives the directory to write and a function to
    report stages; temporary files beside that directory are removed afterwards. Its exceptions are
    raised.
    """
    target = cache_dir() / name
    if target.is_dir():
        return target
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _locked(target):
        if target.is_dir():
            return target
        work = target.with_name(f"{UNFINISHED}{target.name}")
        shutil.rmtree(work, ignore_errors=True)  # left by a killed process
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
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock on `target`; remove its file at the end, as waiters create a new one."""
    file = target.with_name(f"{target.name}{LOCK}")
    with FileLock(file):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


@contextmanager
def _progress() -> Iterator[Stage]:
    """Yield a function that shows the stage: a spinner on a terminal, else a log line.

    Child processes only log, as the terminal is the parent's.
    """
    console = Console(file=sys.stderr)
    if not console.is_terminal or multiprocessing.parent_process() is not None:
        yield log.info
        return
    with console.status("") as status:
        yield lambda text: status.update(f"{text}…")
