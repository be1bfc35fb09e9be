"""Compiles the C++ kernels for this very machine, once, into the user's cache.

The sources include no header of PyTorch's, so this takes seconds, and the result
does not depend on PyTorch's version: it is called through a plain C ABI.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import platformdirs

from kernels.machine import cpu_identity

SOURCES = ("paged_attention.cpp", "write_kv.cpp", "copy_blocks.cpp")
HEADERS = ("cache.h", "fetcher.h", "plan.h", "product.h", "vector.h")
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
COMPILE_TIMEOUT = 120  # seconds


def load_library() -> ctypes.CDLL:
    """Returns the compiled kernels, compiling them if this is the first time.

    Several processes may do this at once: each compiles under a name of its own
    and the last to finish renames its file into place.

    Raises:
        OSError: there is no C++ compiler, it fails, or the result cannot be loaded.
    """
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C++ compiler: set CXX or install g++")
    path = _library_path(compiler)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _compile(compiler, path)
    return ctypes.CDLL(str(path))


def find_compiler() -> str | None:
    """Returns the C++ compiler to use: $CXX, else the first usual one on the path."""
    named = os.environ.get("CXX")
    candidates = [named] if named else ["c++", "g++", "clang++"]
    return next((found for name in candidates if (found := shutil.which(name))), None)


def _library_path(compiler: str) -> Path:
    """Returns where the library for these sources, flags and this CPU is kept."""
    parts = [compiler, *FLAGS, cpu_identity(), str(_openmp_runtime())]
    parts += [(Path(__file__).parent / name).read_text() for name in SOURCES + HEADERS]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return Path(platformdirs.user_cache_dir("octavo")) / "kernels" / f"cpu-{digest[:16]}.so"


def _openmp_runtime() -> Path | None:
    """Returns the OpenMP runtime that this process has loaded already: PyTorch's.

    PyTorch brings its own. Linked against the system's, the kernels would run a
    second pool of threads, which spin while the first one works.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    files = {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if line.count("/")}
    for prefix in ("libgomp", "libiomp5", "libomp"):
        for file in sorted(files):
            if file.name.startswith(prefix):
                return file
    return None


def _compile(compiler: str, path: Path) -> None:
    """Compiles the sources and moves the library to `path` in one step."""
    here = Path(__file__).parent
    openmp = _openmp_runtime()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        objects = [f"{scratch}/{Path(name).stem}.o" for name in SOURCES]
        for source, target in zip(SOURCES, objects, strict=True):
            _run([compiler, *FLAGS, "-c", str(here / source), "-o", target])
        # Without -fopenmp here, the linker takes only the runtime it is given.
        runtime = ["-fopenmp"] if openmp is None else [str(openmp)]
        library = f"{scratch}/library.so"
        _run([compiler, "-shared", "-o", library, *objects, *runtime])
        Path(library).replace(path)


def _run(command: list[str]) -> None:
    """Runs the compiler; an OSError carries what it said."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} took more than {COMPILE_TIMEOUT} s") from error
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
