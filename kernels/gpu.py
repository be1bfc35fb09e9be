"""The properties of a GPU that the kernels depend on.

PyTorch's build for ROCm calls AMD's GPUs "cuda" and gives them a compute capability, too. Only
`Gpu.arch` tells the maker of a GPU.
"""

from dataclasses import dataclass
from functools import cache

import torch

E4M3_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
"""The fp8 types with 4 exponent bits; a GPU converts at most one of them."""
MAX_THREADS = 1024
"""Maximum threads of a program, on every GPU."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The properties of a GPU.

    Attributes:
        name: The driver's name of the GPU.
        arch: Its instruction set: NVIDIA's compute capability as "sm_90", or AMD's "gfx942".
        warp_size: Threads per warp; AMD calls it a wave.
        shared_bytes: Maximum shared memory of a program; AMD calls it LDS.
        multiprocessors: Number of multiprocessors; AMD calls them compute units.
    """

    name: str
    arch: str
    warp_size: int
    shared_bytes: int
    multiprocessors: int

    @property
    def is_amd(self) -> bool:
        """Whether AMD makes the GPU; else NVIDIA does."""
        return self.arch.startswith("gfx")

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of an NVIDIA GPU; AMD's have none, despite PyTorch's value."""
        return (0, 0) if self.is_amd else divmod(int(self.arch.removeprefix("sm_")), 10)

    @property
    def e4m3(self) -> torch.dtype | None:
        """The fp8 type with 4 exponent bits that the GPU converts in hardware, or None.

        AMD's gfx94x have their own type, up to 240, without infinity and minus zero. AMD's gfx12
        has such instructions, too, but Triton does not use them.
        """
        if self.arch.startswith("gfx94"):
            return torch.float8_e4m3fnuz
        has = self.arch.startswith("gfx95") if self.is_amd else self.capability >= (8, 9)
        return torch.float8_e4m3fn if has else None

    @property
    def multiplies_in_place(self) -> bool:
        """Whether matrix units read operands from shared memory instead of registers.

        They do on Hopper (9) and data-centre Blackwell (10, 11), not on desktop Blackwell (12).
        """
        return self.capability[0] in {9, 10, 11}

    @property
    def copies_to_shared(self) -> bool:
        """Whether the GPU copies from memory to shared memory without going through registers."""
        return not self.is_amd or self.arch.startswith("gfx95")

    @property
    def registers(self) -> int:
        """Minimum registers of a multiprocessor."""
        return (128 if self.is_amd else 64) << 10

    @property
    def reserved_bytes(self) -> int:
        """Bytes of shared memory per program that the system reserves."""
        return 0 if self.is_amd else 1 << 10


INTERPRETER = Gpu("interpreter", "sm_80", 32, 99 << 10, 4)
"""The GPU of Triton's interpreter, small enough that tests split sequences."""


@cache
def describe_gpu(device: torch.device) -> Gpu:
    """Return the properties of a GPU; for a CPU, those of Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = properties.gcnArchName.partition(":")[0]  # features follow: "gfx942:xnack-"
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    # On NVIDIA's GPUs programs must request more than 48 KiB explicitly.
    shared_bytes = getattr(
        properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
    )
    return Gpu(
        properties.name, arch, properties.warp_size, shared_bytes, properties.multi_processor_count
    )


def e4m3_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that `fp8_e4m3` means on a device, supported or not."""
    return describe_gpu(device).e4m3 or torch.float8_e4m3fn
