"""The C++ kernels compiled once for this machine, into Octavo's cache."""

import ctypes
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from octavo.kernels.cpu.compile import compile_library, find_compiler, library_name
from octavo.kernels.cpu_target import compiler_target, cpu_identity
from octavo.kernels.integrity import check_trusted, seal, verify_seal

log = logging.getLogger(__name__)

ATTEMPTS = 5
"""Maximum attempts to compile a library if other processes keep removing or damaging it."""
LIBRARY = "kernels/cpu-{}.so"
"""Path in the cache, with the digest of `library_name`. The file's time is its last load, and
processes lock it while loaded: `engine.cache_cleanup` finds unused files by both."""
PREBUILT = Path(__file__).resolve().parents[2] / "build" / "kernels"
"""The folder where `make` puts the library that it compiled, under the same name."""


def load_compiled() -> ctypes.CDLL:
    """Return the kernels compiled for this machine; compile them the first time.

    Several processes may do this at once: one compiles, and the others wait for its library. Where
    files cannot be locked, each compiles to its own file, and the last one to finish renames it
    into place. A library that is damaged, or that another user may have written, is compiled again.

    Raises:
        OSError: There is no C++ compiler, it fails, the result cannot be loaded, or another user
            can write to the library's directory.
    """
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError(_no_compiler())
    path = _library_path(compiler)
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    check_trusted(path.parent)
    for _ in range(ATTEMPTS):
        if _is_intact(path) and _hold(path):
            return _load(path, compiler)
        with _locked(path.parent):
            if not _is_intact(path):
                _compile(compiler, path)
    raise OSError(f"{path} was removed or damaged each of {ATTEMPTS} times after it was compiled")


def load(path: Path) -> ctypes.CDLL:
    """Load a library, with PyTorch's OpenMP runtime.

    Raises:
        OSError: It cannot be loaded.
    """
    ctypes.CDLL(str(_openmp()), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def _load(path: Path, compiler: str) -> ctypes.CDLL:
    try:
        return load(path)
    except OSError as error:
        if "__kmpc" not in str(error):
            raise
        raise OSError(
            f"{compiler} is Clang, whose OpenMP code does not run with PyTorch's libgomp:"
            " install g++, or set CXX to it"
        ) from error


def _no_compiler() -> str:
    """Return the error message for a machine without a C++ compiler."""
    if named := os.environ.get("CXX"):
        return f"CXX is {named!r}, which is not on the path: install it, or unset CXX to use g++"
    return "there is no C++ compiler: install g++, or set CXX to one"


def _library_path(compiler: str) -> Path:
    """Return the path of the library for these sources, these flags and this CPU."""
    # As in octavo.common.models.cache, which kernels may not import.
    cache = os.environ.get("OCTAVO_CACHE_DIR") or platformdirs.user_cache_dir("octavo")
    name = library_name(compiler, compiler_target(), cpu_identity())
    return Path(cache).expanduser() / "kernels" / name


def _is_intact(path: Path) -> bool:
    """Return whether a library exists, intact and trusted; if not intact or trusted, remove it."""
    try:
        check_trusted(path)
        verify_seal(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        log.warning("the CPU kernels are compiled again: %s", error)
        path.unlink(missing_ok=True)
        return False
    return True


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a lock on a directory; where files cannot be locked, hold none."""
    file = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _hold(path: Path) -> bool:
    """Record that a library is loaded now, and lock it against removal until this process ends.

    Returns:
        Whether the library exists.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    with suppress(OSError):  # if locks or times cannot be set, nothing can be removed either
        fcntl.flock(file, fcntl.LOCK_SH)
        os.utime(path)
    return path.exists()  # it may have been removed before it was locked


def _openmp() -> Path:
    """Return the path of PyTorch's OpenMP runtime, whose name differs from one to another.

    Raises:
        OSError: It cannot be found, for example on other systems than Linux.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = sorted({Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/")})
    for prefix in ("libgomp", "libiomp5", "libomp"):
        for file in files:
            if file.name.startswith(prefix):
                return file
    raise FileNotFoundError("no libgomp is loaded")


def _compile(compiler: str, path: Path) -> None:
    """Compile the sources, if `make` has not, and move the library to `path` atomically."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        library = Path(scratch) / "library.so"
        if (made := PREBUILT / path.name).is_file():
            shutil.copyfile(made, library)
        else:
            compile_library(compiler, [compiler_target()], library, Path(scratch))
        seal(library)
        library.chmod(0o755)
        library.replace(path)
