"""What compiled code depends on of the machine it is for."""

import os
import platform
from pathlib import Path

MARCH = "OCTAVO_MARCH"
"""Environment variable: the CPU to compile for, as the compiler's -march names it (`haswell`,
`x86-64-v3`, `armv8.2-a+bf16`). Default: this one."""
ISA_VARIABLES = (MARCH, "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that hold the kernels, PyTorch and oneDNN to a part of the CPU's
instructions. The order of packed weights depends on them."""
CPU_INFO = Path("/proc/cpuinfo")
"""Where Linux says what its CPUs are."""


def march() -> str | None:
    """Return the CPU to compile for where the environment names one."""
    return os.environ.get(MARCH) or None


def compiler_target() -> str:
    """Return the C++ compiler's flag for the CPU to compile for."""
    if named := march():
        return f"-march={named}"
    # Elsewhere -march=native is unknown to some compilers.
    return "-march=native" if platform.machine() in {"x86_64", "AMD64"} else "-mcpu=native"


def cpu_identity() -> str:
    """Return what tells this CPU's instruction set, as far as it may be used, from another's."""
    held = [f"{name}={os.environ[name]}" for name in ISA_VARIABLES if os.environ.get(name)]
    wanted = ("model name", "flags", "Features", "CPU part")
    known = {line for line in _cpu_info() if line.startswith(wanted)}
    return "\n".join([*sorted(known or {platform.machine() + platform.processor()}), *held])


def onednn_has_amx() -> bool:
    """Return whether oneDNN may use AMX: the CPU has it, and no variable holds oneDNN to less."""
    held_to = _onednn_held_to()
    return "amx_tile" in _cpu_flags() and ("AMX" in held_to or held_to == "DEFAULT")


def onednn_int8_saturates() -> bool:
    """Return whether oneDNN sums products of two bytes in 16 bits, where they may overflow.

    It does so on x86 without VNNI: a pair of products must not pass 32,767.
    """
    if platform.machine() not in {"x86_64", "AMD64"}:
        return False
    lacking = not {"avx512_vnni", "avx_vnni"} & _cpu_flags()
    return lacking or _onednn_held_to() in {"SSE41", "AVX", "AVX2", "AVX512_CORE"}


def _onednn_held_to() -> str:
    """Return the greatest instruction set that oneDNN may use, as it names them."""
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    return next((os.environ[name] for name in names if os.environ.get(name)), "DEFAULT").upper()


def _cpu_flags() -> set[str]:
    """Return the names of an x86 CPU's instruction sets, as Linux has them."""
    return set(next((line for line in _cpu_info() if line.startswith("flags")), "").split())


def _cpu_info() -> list[str]:
    """Return what Linux says of this machine's CPUs; empty elsewhere."""
    try:
        return CPU_INFO.read_text().splitlines()
    except OSError:
        return []
