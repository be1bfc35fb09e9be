"""The cache directory of prepared models: each is made once, whole or not at all."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs
import structlog
from filelock import FileLock, Timeout
from rich.console import Console

Stage = Callable[[str], None]
"""Says what is being done now."""

log = structlog.get_logger(__name__)

UNFINISHED = ".preparing-"
"""Before a model's name: the directory that is worked in."""
LOCK = ".lock"
"""After a model's name: the file that is locked meanwhile."""


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
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _locked(target):
        if target.is_dir():
            return target
        work = _work(target)
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


def remove(name: str) -> bool:
    """Removes the cached model `name`, at once for all who look for it.

    Returns:
        Whether there was one that nobody is just making.
    """
    target = cache_dir() / name
    work = _work(target)
    try:
        with _locked(target, blocking=False):
            shutil.rmtree(work, ignore_errors=True)
            target.rename(work)
            shutil.rmtree(work, ignore_errors=True)
    except (Timeout, OSError):
        return False
    return True


def remove_unfinished(folder: str) -> None:
    """Removes what is left in `folder` of preparations and removals whose process was killed."""
    directory = cache_dir() / folder
    for work in directory.glob(f"{UNFINISHED}*/"):
        target = work.with_name(work.name.removeprefix(UNFINISHED))
        with suppress(Timeout), _locked(target, blocking=False):
            shutil.rmtree(work, ignore_errors=True)
            log.info("an interrupted preparation was removed", path=str(work))
    for lock in directory.glob(f"*{LOCK}"):
        target = lock.with_name(lock.name.removesuffix(LOCK))
        with suppress(Timeout), _locked(target, blocking=False):
            pass


@contextmanager
def _locked(target: Path, *, blocking: bool = True) -> Iterator[None]:
    """Held by who makes or removes `target`.

    The lock's file goes at the end: who waits for it sees that it is gone, and makes a new one.

    Raises:
        Timeout: it is held, and not to be waited for.
    """
    file = target.with_name(f"{target.name}{LOCK}")
    with FileLock(file).acquire(blocking=blocking):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _work(target: Path) -> Path:
    """Where `target` is made."""
    return target.with_name(f"{UNFINISHED}{target.name}")


@contextmanager
def _progress() -> Iterator[Stage]:
    """Yields a function that tells the stage: a spinner on a terminal, else a log line."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield log.info
        return
    with console.status("") as status:
        yield lambda text: status.update(f"{text}…")
