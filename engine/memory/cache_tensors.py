"""The KV cache's tensors: on the device and in CPU swap space."""

from collections.abc import Iterator

import torch

from octavo.common import resources
from octavo.engine.kv_cache import Transfers
from octavo.engine.memory import huge_pages
from octavo.engine.memory.pinned import pin
from octavo.engine.memory.swap import CopyTime, make_swapper
from octavo.engine.model_shape import ModelShape
from octavo.kernels.ops import copy_blocks

GIB = 1 << 30
HOST_SHARE = 0.25
"""Of the host's free memory: what KV cache and swap space each take where nobody said, at most."""


class CacheTensors:
    """One tensor of blocks on the device and one like it in host memory.

    Both are `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`:
    a block is contiguous over all layers, K and V, so copying or swapping it
    is one copy. On a GPU, swap space lags behind: only swaps may read it.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_blocks: int,
        num_swap_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        block = (shape.num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim)
        self.device = torch.empty((num_blocks, *block), dtype=dtype, device=device)
        self._populating: Iterator[bool] = iter(())
        if device.type == "cpu":
            huge_pages.ask_for(self.device)
            self._populating = huge_pages.populate(self.device)
        self.swap = torch.empty((num_swap_blocks, *block), dtype=dtype)
        if device.type == "cuda":
            pin(self.swap, owner=self)
        self._swapper = make_swapper(self.device, self.swap)
        self.layers = [
            (self.device[:, layer, 0], self.device[:, layer, 1])
            for layer in range(shape.num_layers)
        ]

    def populate(self) -> bool:
        """Has some more of a CPU's blocks backed by memory, which takes milliseconds.

        Else the steps that first write to them wait for it: 48 requests at once took 5% longer.

        Returns:
            Whether there were any left.
        """
        return next(self._populating, False)

    def apply(self, transfers: Transfers) -> None:
        """Do a step's copies, as the step sees them in the order that `Transfers` states."""
        if transfers.swap_out:
            self._swapper.swap_out(transfers.swap_out)
        if transfers.swap_in:
            self._swapper.swap_in(transfers.swap_in)
        for pairs in _independent(transfers.copies):
            copy_blocks(self.device, torch.tensor(pairs))

    def take_copy_times(self) -> list[CopyTime]:
        """How long swaps took, of those that are known to have ended since the last call."""
        return self._swapper.take_times()


def _independent(pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split copies so that no run writes a block that it also reads."""
    runs: list[list[tuple[int, int]]] = []
    sources: set[int] = set()
    for source, target in pairs:
        if not runs or target in sources or any(source == t for _, t in runs[-1]):
            runs.append([])
            sources = set()
        runs[-1].append((source, target))
        sources.add(source)
    return runs


def blocks_in(gib: float, block_bytes: int) -> int:
    """Whole blocks in `gib` GiB."""
    return int(gib * GIB) // block_bytes


def default_cache_gib(device: torch.device, utilisation: float, taken: int) -> float:
    """GiB for the KV cache where nobody said: what the device has to spare.

    On a GPU, the cache gets `utilisation` of the memory less `taken` bytes, which are all
    that is not the cache. On a CPU, whose memory others share, `HOST_SHARE` of what is
    free, at most 4 GiB.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return max(0.0, (utilisation * total - taken) / GIB)
    return min(4.0, HOST_SHARE * resources.memory().available / GIB)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes of a GPU in use since the peak was reset, other processes' too."""
    total = torch.cuda.get_device_properties(device).total_memory
    unused, _ = torch.cuda.mem_get_info(device)
    others = total - unused - torch.cuda.memory_reserved(device)
    return others + torch.cuda.max_memory_allocated(device)


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that are free once this process has given back what it can."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def default_swap_gib() -> float:
    """GiB for swap space where nobody said."""
    return min(2.0, HOST_SHARE * resources.memory().available / GIB)


def memory_bytes(device: torch.device) -> int:
    """All the memory of a device that this process may use."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return resources.memory().total
