"""Compiles the C++ kernels into one library.

The sources include no PyTorch headers, so this takes seconds. It imports nothing of Octavo or
PyTorch: wheels are made with it too, and `make` compiles while packages are installed.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = [
    f"{name}.cpp"
    for name in (
        *("latent_attention", "paged_attention", "linear", "experts", "linear_blocks"),
        *("draw_tokens", "score_tokens", "write_kv", "argmax", "copy_blocks", "low_rank"),
        *("rms_norm", "mask_logits", "stored_blocks", "round_weights", "ssd", "gated_delta"),
        *("causal_conv", "selective_scan", "ragged_attention", "program", "sum_over_ranks"),
        *("spill", "layer_norm", "step", "pin_threads", "amx", "isa"),
    )
]
"""Sources in the order of their compile times, longest first."""
FLAGS = (
    "-O2",  # compiles twice as fast as -O3, to equally fast code
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
FLAGS_OF = dict.fromkeys(
    ("linear.cpp", "linear_blocks.cpp", "experts.cpp", "latent_attention.cpp"),
    ("-fno-tree-ter",),
)
"""A source's own flags. This one stops GCC from hoisting loads of weights until registers run out:
up to a quarter fewer instructions on CPUs with 16 vector registers."""
TIMEOUT = 600  # seconds per source; on an idle core it takes 10


def find_compiler() -> str | None:
    """Return the C++ compiler to use: $CXX, else the first known one on the path.

    GCC comes first: Clang's OpenMP code does not run with PyTorch's libgomp.
    """
    named = os.environ.get("CXX")
    candidates = [named] if named else ["g++", "c++", "clang++"]
    return next((path for name in candidates if (path := shutil.which(name))), None)


def library_name(compiler: str, target: str, cpu: str) -> str:
    """Return the file name of a library, with a digest of everything it depends on.

    Args:
        compiler: The C++ compiler.
        target: Its flag for the CPU.
        cpu: Text that identifies the CPU.
    """
    here = Path(__file__).parent
    names = [*SOURCES, *sorted(header.name for header in here.glob("*.h"))]
    sources = [(here / name).read_text() for name in names]
    parts = [compiler, target, cpu, *FLAGS, repr(FLAGS_OF), *sources]
    return f"cpu-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"


def compile_library(
    compiler: str, target: Sequence[str], path: Path, scratch: Path, *, flags: Sequence[str] = ()
) -> None:
    """Compile the sources to a shared library.

    It names PyTorch's library without a path, and no OpenMP runtime: PyTorch has loaded both. The
    system's runtime would start a second thread pool, which spins while the first one works.

    Args:
        compiler: The C++ compiler.
        target: Its flags for the CPU.
        path: The library.
        scratch: A directory for object files.
        flags: More flags of the linker.

    Raises:
        OSError: The compiler fails or takes too long.
    """
    here = Path(__file__).parent
    objects = [str(scratch / f"{Path(name).stem}.o") for name in SOURCES]
    commands = [
        [compiler, *FLAGS, *FLAGS_OF.get(source, ()), *target, "-c", str(here / source), "-o", made]
        for source, made in zip(SOURCES, objects, strict=True)
    ]
    torch = scratch / "libtorch_cpu.so"
    named = ["-nostdlib", "-shared", f"-Wl,-soname,{torch.name}", "-x", "c++", os.devnull]
    run([compiler, *named, "-o", str(torch)])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))
    # Without -fopenmp here, the linker names no runtime.
    linked = ["-Wl,--no-as-needed", str(torch), *flags]
    run([compiler, "-shared", "-o", str(path), *objects, *linked])


def run(command: Sequence[str]) -> None:
    """Run the compiler; raise an OSError with its output if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} took more than {TIMEOUT} s") from error
    if done.returncode:
        lines = done.stderr.splitlines()
        why = next((line for line in lines if "error" in line), lines[-1] if lines else "")
        raise OSError(
            f"{command[0]} failed: {why.strip()}\n{' '.join(command)}\n{done.stderr[-2000:]}"
        )
