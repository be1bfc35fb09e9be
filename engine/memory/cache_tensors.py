"""The KV cache's tensors: on the device and in CPU swap space."""

from collections.abc import Iterator

import torch

from octavo.common import resources
from octavo.common.resources import Memory
from octavo.engine.kv_cache import Transfers
from octavo.engine.memory.cache_layout import CacheLayout, LayerPlace
from octavo.engine.memory.pinned import pin
from octavo.engine.memory.spill_file import SpillFile
from octavo.engine.memory.swap import make_swapper
from octavo.kernels import huge_pages
from octavo.kernels.metadata import LayerCache, StateCache
from octavo.kernels.ops import copy_blocks
from octavo.kernels.whole_numbers import width_of

GIB = 1 << 30
HOST_SHARE = 0.25
"""Default limit of the KV cache and of swap space, each as a share of the host's free memory."""


class CacheTensors:
    """A tensor of blocks on the device, and one in host memory.

    Both are `[num_blocks, block_elements]`. A block is contiguous over a group's layers, K and V,
    so one copy moves it. On a GPU, copies to swap space may be pending, so only swaps may read it.

    Attributes:
        layout: The locations of each layer's K and V in a block.
        layers: Each layer's cache, a view of the device's tensor.
        states: Each state's location in a block.
        swapper: Copies blocks between the device and swap space.
        spill: The file of the spilled sequence, or None.

    Args:
        layout: The layout of the cache's blocks.
        num_blocks: Number of blocks on the device.
        num_swap_blocks: Number of blocks in swap space.
        dtype: Type of keys and values.
        device: The cache's device.
        model_dtype: Type of the model; default `dtype`.
        spill: The file of the spilled sequence, on a CPU.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_blocks: int,
        num_swap_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        model_dtype: torch.dtype | None = None,
        spill: SpillFile | None = None,
    ) -> None:
        self.layout = layout
        self.spill = spill
        size = layout.block_elements
        self.device = torch.empty((num_blocks, size), dtype=dtype, device=device)
        self._populating: Iterator[bool] = iter(())
        if device.type == "cpu":
            huge_pages.ask_for(self.device)
            self._populating = huge_pages.populate(self.device)
        self.swap = torch.empty((num_swap_blocks, size), dtype=dtype)
        if device.type == "cuda":
            pin(self.swap, owner=self)
        self.swapper = make_swapper(self.device, self.swap)
        self.layers = layer_caches(self.device, layout)
        self.states = state_caches(self.device, layout, model_dtype or dtype)

    def populate(self) -> bool:
        """Back more of a CPU's blocks with memory, which takes some milliseconds.

        Otherwise the steps that first write to them wait for it: 48 requests took 5% longer.

        Returns:
            Whether any blocks were left.
        """
        return next(self._populating, False)

    def apply(self, transfers: Transfers) -> None:
        """Do a step's copies, in the order of `Transfers`."""
        if transfers.swap_out:
            self.swapper.swap_out(transfers.swap_out)
        if transfers.swap_in:
            self.swapper.swap_in(transfers.swap_in)
        for pairs in _independent(transfers.copies):
            copy_blocks(self.device, torch.tensor(pairs))
        for blocks, unit in transfers.spills:
            assert self.spill is not None
            self.spill.write(self.device, blocks, unit)


def layer_caches(blocks: torch.Tensor, layout: CacheLayout) -> list[LayerCache]:
    """Return each layer's cache, a view of `blocks`, `[num_blocks, block_elements]`."""

    def view(place: LayerPlace, first: int, heads: int, dim: int) -> torch.Tensor:
        size, width = layout.groups[place.group].block_size, width_of(dim, blocks.dtype)
        strides = (blocks.stride(0), size * width, width, 1)
        return blocks.as_strided((len(blocks), heads, size, width), strides, first)

    return [
        LayerCache(
            view(place, place.keys, shape.num_kv_heads, shape.key_dim),
            None
            if shape.latent
            else view(place, place.values, shape.num_kv_heads, shape.value_dim),
            place.group,
            written=shape.source is None,
        )
        for shape, place in zip(layout.shape.layers, layout.places, strict=True)
    ]


def state_caches(blocks: torch.Tensor, layout: CacheLayout, dtype: torch.dtype) -> list[StateCache]:
    """Return each state's location, a view of `blocks`, `[num_blocks, block_elements]`."""
    states = []
    for shape, place in zip(layout.shape.states, layout.states, strict=True):
        typed = blocks.view(torch.uint8).view(torch.float32 if shape.full_precision else dtype)
        height, width = shape.row_shape
        sizes = (len(blocks), place.rows_per_block, height, width)
        strides = (typed.stride(0), height * width, width, 1)
        states.append(StateCache(typed.as_strided(sizes, strides), place.first_row, place.group))
    return states


def _independent(pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split copies into runs; no run writes a block that it also reads."""
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
    """Return the number of whole blocks in `gib` GiB."""
    return int(gib * GIB) // block_bytes


def default_cache_gib(
    device: torch.device, utilisation: float, taken: int, memory: Memory | None = None
) -> float:
    """Return the default size of the KV cache in GiB.

    On a GPU this is `utilisation` of its memory less `taken` bytes, which cover everything but the
    cache. On a CPU, whose memory is shared, it is `HOST_SHARE` of the free memory less `taken`
    bytes, which are free but will be needed; at most 4 GiB.

    Args:
        device: The cache's device.
        utilisation: The share of the device's memory that the engine may use.
        taken: Bytes that the cache cannot use.
        memory: The device's memory. Default: its current state.
    """
    memory = memory or memory_of(device)
    if device.type == "cuda":
        return max(0.0, (utilisation * memory.total - taken) / GIB)
    return min(4.0, _share(memory, taken))


def peak_memory(device: torch.device) -> int:
    """Return the peak of a GPU's used bytes since its reset, including other processes'."""
    total = torch.cuda.get_device_properties(device).total_memory
    unused, _ = torch.cuda.mem_get_info(device)
    others = total - unused - torch.cuda.memory_reserved(device)
    return others + torch.cuda.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Let `peak_memory` count from now on, without what loading the model used."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def free_memory(device: torch.device) -> int:
    """Return a GPU's free bytes, after this process has released its cached memory."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def default_swap_gib() -> float:
    """Return the default size of swap space in GiB: at most 2."""
    return min(2.0, _share(resources.memory(), 0))


def _share(memory: Memory, taken: int) -> float:
    """Return `HOST_SHARE` of the free memory less `taken` bytes, in GiB."""
    return HOST_SHARE * max(0, memory.available - taken) / GIB


def memory_of(device: torch.device) -> Memory:
    """Return the memory of a device that this process may use."""
    if device.type == "cuda":
        total = int(torch.cuda.get_device_properties(device).total_memory)
        return Memory(total, torch.cuda.mem_get_info(device)[0])
    return resources.memory()
