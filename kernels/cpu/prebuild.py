"""Compiles the kernels without PyTorch, and outside of the package.

protos/build_hook.py makes a wheel's kernels: one library for each of instruction_sets.py.
`make` runs this file, which makes one for this machine while packages are installed; see build.py.
With `--all` it makes a wheel's, for images.
"""

import os
import platform
import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def prebuild(target: Path) -> list[Path]:
    """Compile a library for each instruction set of this machine's architecture.

    Args:
        target: The directory for the libraries.

    Returns:
        The libraries; none without g++ or without instruction sets for this architecture.

    Raises:
        OSError: The compiler fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    isas = _run("instruction_sets.py")["INSTRUCTION_SETS"].get(platform.machine(), ())
    if compiler is None:
        return []
    compile_library = _run("compile.py")["compile_library"]
    target.mkdir(parents=True, exist_ok=True)
    made = []
    with tempfile.TemporaryDirectory() as scratch:
        for isa in isas:
            library, strip = target / f"{isa.name}.so", ["-Wl,--strip-all"]
            compile_library(compiler, isa.flags, library, Path(scratch), flags=strip)
            made.append(library)
    return made


def prebuild_here(target: Path) -> Path | None:
    """Compile a library for this machine unless it exists.

    Args:
        target: Its directory; other libraries there are removed.

    Returns:
        The library's path; None if there is no compiler.

    Raises:
        OSError: The compiler fails.
    """
    compiling, target_cpu = _run("compile.py"), _run("../cpu_target.py")
    if (compiler := compiling["find_compiler"]()) is None:
        return None
    flag = target_cpu["compiler_target"]()
    name = compiling["library_name"](compiler, flag, target_cpu["cpu_identity"]())
    library: Path = target / name
    if not library.exists():
        target.mkdir(parents=True, exist_ok=True)
        for old in target.iterdir():
            old.unlink()
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / library.name
            compiling["compile_library"](compiler, [flag], made, Path(scratch))
            made.replace(library)
    return library


def _run(name: str) -> dict[str, Any]:
    """Run a Python file that imports nothing of Octavo; return its names."""
    return runpy.run_path(str(HERE / name))


if __name__ == "__main__":
    *every, folder = sys.argv[1:]
    try:
        (prebuild if every == ["--all"] else prebuild_here)(Path(folder))
    except OSError as error:
        sys.exit(f"the CPU kernels are left to the first start: {error}")
