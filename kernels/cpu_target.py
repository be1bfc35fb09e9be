"""The CPU that kernels are compiled for: its instruction sets and the compiler's flag."""

import os
import platform
from pathlib import Path

MARCH = "OCTAVO_MARCH"
"""Environment variable: the CPU to compile for, as the compiler's -march takes it (`haswell`,
`x86-64-v3`, `armv8.2-a+bf16`, or `native` for this one). Default: a wheel's own kernels, else
`native`."""
ISA_VARIABLES = (MARCH, "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that restrict the instruction sets of the kernels, PyTorch and oneDNN. The
layout of packed weights depends on them."""
CPU_INFO = Path("/proc/cpuinfo")
"""Linux's description of the CPUs."""


def march() -> str | None:
    """Return the CPU to compile for, if the environment names one."""
    return os.environ.get(MARCH) or None


def compiler_target() -> str:
    """Return the C++ compiler's flag for the CPU to compile for."""
    if (named := march()) and named != "native":
        return f"-march={named}"
    # Some compilers for other CPUs do not know -march=native.
    return "-march=native" if platform.machine() in {"x86_64", "AMD64"} else "-mcpu=native"


def cpu_identity() -> str:
    """Return a text that identifies this CPU's instruction sets and the restrictions on them."""
    held = [f"{name}={os.environ[name]}" for name in ISA_VARIABLES if os.environ.get(name)]
    wanted = ("model name", "flags", "Features", "CPU part")
    known = {line for line in _cpu_info() if line.startswith(wanted)}
    return "\n".join([*sorted(known or {platform.machine() + platform.processor()}), *held])


def cpu_features() -> set[str]:
    """Return Linux's names of this CPU's instruction sets."""
    lines = (line for line in _cpu_info() if line.startswith(("flags", "Features")))
    return set(next(lines, "").partition(":")[2].split())


def onednn_int8_saturates() -> bool:
    """Return whether oneDNN sums pairs of byte products in 16 bits, which saturate at 32,767.

    It does on x86 without VNNI.
    """
    if platform.machine() not in {"x86_64", "AMD64"}:
        return False
    lacking = not {"avx512_vnni", "avx_vnni"} & cpu_features()
    return lacking or _onednn_limit() in {"SSE41", "AVX", "AVX2", "AVX512_CORE"}


def _onednn_limit() -> str:
    """Return oneDNN's name of the best instruction set that it may use."""
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    return next((os.environ[name] for name in names if os.environ.get(name)), "DEFAULT").upper()


def _cpu_info() -> list[str]:
    """Return Linux's description of this machine's CPUs; empty on other systems."""
    try:
        return CPU_INFO.read_text().splitlines()
    except OSError:
        return []
