"""Compiles the C++ kernels for this very machine, once, into Octavo's cache.

The sources include no header of PyTorch's, so this takes seconds. They are called
through a plain C ABI, and call PyTorch through its own.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import platformdirs

from octavo.kernels.integrity import SEAL, check_trusted, seal, verify_seal
from octavo.kernels.machine import compiler_target, cpu_identity

SOURCES = (
    *("paged_attention.cpp", "linear.cpp", "draw_tokens.cpp", "score_tokens.cpp", "aoti.cpp"),
    *("write_kv.cpp", "argmax.cpp", "copy_blocks.cpp", "pin_threads.cpp"),
)
"""Those that take longest to compile first."""
HEADERS = ("cache.h", "fetcher.h", "linear.h", "plan.h", "product.h", "row.h", "vector.h")
FLAGS = (
    "-O2",  # compiles in half the time of -O3, and is as fast
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
log = logging.getLogger(__name__)

COMPILE_TIMEOUT = 120  # seconds
ATTEMPTS = 5
"""How often a library is compiled that another process removes or damages meanwhile."""
LIBRARY = "kernels/cpu-{}.so"
"""In the cache, with a digest of what it was made of. Its time is when it was loaded last, and who
has it loaded now has a lock on it: by these, old ones are told."""


def load_library() -> ctypes.CDLL:
    """Return the compiled kernels, compiling them if this is the first time.

    Several processes may do this at once: each compiles under a name of its own
    and the last to finish renames its file into place. A library that is damaged, or that
    another user can have written, is compiled again.

    Raises:
        OSError: There is no C++ compiler, it fails, the result cannot be loaded, or another
            user can write to the library's directory.
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
        _compile(compiler, path)
    raise OSError(f"{path} is gone or damaged each time that it was compiled")


def _load(path: Path, compiler: str) -> ctypes.CDLL:
    # Globally: a compiled step finds the kernels by their names alone.
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if "__kmpc" not in str(error):
            raise
        raise OSError(
            f"{compiler} is Clang, whose OpenMP code does not run with PyTorch's libgomp:"
            " install g++, or set CXX to it"
        ) from error


def find_compiler() -> str | None:
    """Return the C++ compiler to use: $CXX, else the first usual one on the path.

    GCC first: Clang's OpenMP code does not run with the libgomp that PyTorch brings.
    """
    named = os.environ.get("CXX")
    candidates = [named] if named else ["g++", "c++", "clang++"]
    return next((found for name in candidates if (found := shutil.which(name))), None)


def _no_compiler() -> str:
    """Say what to do where there is no C++ compiler."""
    if named := os.environ.get("CXX"):
        return f"CXX is {named!r}, which is not on the path: install it, or unset CXX to use g++"
    return "there is no C++ compiler: install g++, or set CXX to one"


def _library_path(compiler: str) -> Path:
    """Return where the library for these sources, flags and this CPU is kept."""
    parts = [compiler, *FLAGS, SEAL.decode(), compiler_target(), cpu_identity()]
    parts += map(str, _loaded_libraries())
    parts += [(Path(__file__).parent / name).read_text() for name in SOURCES + HEADERS]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    # As octavo.common.models.cache has it, which kernels may not import.
    cache = os.environ.get("OCTAVO_CACHE_DIR") or platformdirs.user_cache_dir("octavo")
    return Path(cache).expanduser() / LIBRARY.format(digest[:16])


def _is_intact(path: Path) -> bool:
    """Return whether a library is there, whole and nobody else's work; remove any other."""
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


def _hold(path: Path) -> bool:
    """Note that a library is loaded now, and keeps it until this process ends.

    Returns:
        Whether there is one.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    with suppress(OSError):  # where locks or times cannot be set, nothing is removed either
        fcntl.flock(file, fcntl.LOCK_SH)
        os.utime(path)
    return path.exists()  # nor was removed before it was held


def _loaded_libraries() -> list[Path]:
    """Return PyTorch's library and its OpenMP runtime, as this process has loaded them.

    PyTorch brings its own runtime. Linked against the system's, the kernels would run a
    second pool of threads, which spin while the first one works.

    Raises:
        OSError: They cannot be found, this not being Linux, say.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = sorted({Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/")})

    def find(*prefixes: str) -> Path:
        for prefix in prefixes:
            for file in files:
                if file.name.startswith(prefix):
                    return file
        raise FileNotFoundError(f"no {prefixes[0]} is loaded")

    return [find("libtorch_cpu"), find("libgomp", "libiomp5", "libomp")]


def _compile(compiler: str, path: Path) -> None:
    """Compile the sources and moves the library to `path` in one step."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        objects = [f"{scratch}/{Path(name).stem}.o" for name in SOURCES]
        commands = [
            [compiler, *FLAGS, compiler_target(), "-c", str(here / source), "-o", target]
            for source, target in zip(SOURCES, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        # Without -fopenmp here, the linker takes only the runtime it is given.
        library = f"{scratch}/library.so"
        _run([compiler, "-shared", "-o", library, *objects, *map(str, _loaded_libraries())])
        seal(Path(library))
        Path(library).chmod(0o755)
        Path(library).replace(path)


def _run(command: list[str]) -> None:
    """Run the compiler; an OSError carries what it said."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} took more than {COMPILE_TIMEOUT} s") from error
    if done.returncode:
        said = done.stderr.splitlines()
        why = next((line for line in said if "error" in line), said[-1] if said else "")
        raise OSError(
            f"{command[0]} failed: {why.strip()}\n{' '.join(command)}\n{done.stderr[-2000:]}"
        )
