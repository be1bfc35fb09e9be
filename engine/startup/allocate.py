"""Allocates a KV cache's tensors."""

from octavo.engine.compilation.load_forward import LoadedForward
from octavo.engine.execution.leader import Leader
from octavo.engine.memory.cache_layout import CacheLayout
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.memory.spill_file import SpillFile


def allocate(
    layout: CacheLayout,
    loaded: LoadedForward,
    num_blocks: int,
    num_swap_blocks: int,
    leader: Leader | None = None,
    *,
    spill: SpillFile | None = None,
) -> CacheTensors:
    """Return the cache's tensors, or this rank's part of them.

    Args:
        layout: The cache's layout.
        loaded: The model, or this rank's part of it.
        num_blocks: Blocks on the device.
        num_swap_blocks: Blocks in swap space.
        leader: Makes the other ranks allocate theirs; None except on rank 0 of several.
        spill: The file of the spilled sequence, or None.
    """
    if leader is not None:
        leader.allocate(num_blocks, num_swap_blocks)
    return CacheTensors(
        layout,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        dtype=loaded.cache_dtype,
        device=loaded.device,
        model_dtype=loaded.dtype,
        spill=spill,
    )
