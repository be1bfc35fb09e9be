"""Chooses the assembler, ptxas, that Triton turns kernels into machine code with.

Before 13.3, ptxas may give registers that an asynchronous product of Hopper still reads another
value (triton#11781), and 12.9 loses an addend of packed 16-bit sums (triton#11581). Triton includes
an old one for Hopper and a newer one for Blackwell; the wheel nvidia-cuda-nvcc has the newest.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import triton

from octavo.kernels.gpu import Gpu

HOPPER, BLACKWELL = (9, 0), (10, 0)


def choose_assembler(gpu: Gpu) -> None:
    """Let Triton assemble for Hopper and later by the newest ptxas in the environment.

    Only versions of torch's own CUDA count: older drivers do not load the code of later ones. A
    path in the environment stays. Call it before the first kernel is compiled: Inductor's processes
    inherit the environment.
    """
    if gpu.is_amd or gpu.capability < HOPPER:
        return
    kind = "PTXAS" if gpu.capability < BLACKWELL else "PTXAS_BLACKWELL"
    cuda = int((torch.version.cuda or "0").partition(".")[0])
    versions = {
        version: path
        for path in _assemblers()
        if (version := _version(path)) and version[0] <= cuda
    }
    if versions:
        os.environ.setdefault(f"TRITON_{kind}_PATH", versions[max(versions)])


def _assemblers() -> Iterator[str]:
    """Return the paths of Triton's assemblers, of those in wheels of CUDA, and of the machine's."""
    packages = Path(triton.__file__).parent
    yield from map(str, packages.glob("backends/nvidia/bin/ptxas*"))
    yield from map(str, packages.parent.glob("nvidia/*/bin/ptxas"))
    if found := shutil.which("ptxas"):
        yield found


def _version(path: str) -> tuple[int, ...]:
    """Return an assembler's version; () if it does not run."""
    try:
        tool = triton.knobs.NvidiaTool.from_path(path)
    except OSError:
        tool = None
    return () if tool is None else tuple(map(int, tool.version.split(".")))
