"""Compiles the kernels for a wheel: one library for each instruction set in levels.py.

`python kernels/cpu/prebuild.py DIRECTORY` does it by hand. protos/build_hook.py runs this without
PyTorch and outside of the package.
"""

import os
import platform
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def prebuild(target: Path) -> list[Path]:
    """Compile a library for each level of this machine's architecture.

    The libraries need PyTorch's by its name alone, and no OpenMP runtime by name: the loader finds
    both among what PyTorch has loaded.

    Args:
        target: The directory for the libraries.

    Returns:
        Them; none if there is no g++ or there are no levels for this architecture.

    Raises:
        OSError: The compiler fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    levels = runpy.run_path(str(HERE / "levels.py"))["LEVELS"].get(platform.machine(), ())
    if compiler is None:
        return []
    compiling = runpy.run_path(str(HERE / "compile.py"))
    target.mkdir(parents=True, exist_ok=True)
    made = []
    with tempfile.TemporaryDirectory() as scratch:
        torch = Path(scratch) / "libtorch_cpu.so"
        named = ["-shared", f"-Wl,-soname,{torch.name}", "-nostdlib", "-x", "c++", os.devnull]
        compiling["run"]([compiler, *named, "-o", str(torch)])
        for level in levels:
            library = target / f"{level.name}.so"
            compiling["compile_library"](
                *(compiler, level.flags, ["-Wl,--no-as-needed", str(torch), "-Wl,--strip-all"]),
                *(library, Path(scratch)),
            )
            made.append(library)
    return made


if __name__ == "__main__":
    print(*prebuild(Path(sys.argv[1])), sep="\n")
