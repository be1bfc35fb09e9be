"""Plans the file of the sequence that does not fit in the KV cache, and makes it."""

from dataclasses import replace
from pathlib import Path

import torch

from octavo.common.kv_cache.layer_groups import LayerGroup
from octavo.engine.memory.cache_layout import CacheLayout
from octavo.engine.memory.cache_tensors import GIB
from octavo.engine.memory.spill_file import SpillFile, SpillPlan, unit_tokens
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.capacity import StartupError
from octavo.kernels import cpu

KEPT_SHARE = 0.75
"""Share of the cache's blocks that the spilled sequence may hold; other requests have the rest."""


def plan_spill(
    settings: EngineSettings,
    layout: CacheLayout,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_blocks: int,
    step_tokens: int,
) -> tuple[SpillPlan, LayerGroup] | None:
    """Return the file's sizes, and the layer group with the tokens that it keeps in blocks.

    Args:
        settings: The engine's settings; without --kv-spill the result is None.
        layout: The cache's layout.
        dtype: The cache's data type.
        device: The cache's device.
        num_blocks: Number of blocks of the cache.
        step_tokens: Maximum tokens that a step computes.

    Raises:
        StartupError: The model or the device does not support it, or a size is too small.
    """
    if settings.kv_spill is None:
        return None
    _check_supported(layout, device)
    (group,) = layout.groups
    unit = unit_tokens(layout, dtype)
    plan = SpillPlan(layout, dtype, unit, 1)
    num_units = int(settings.kv_spill_space * GIB) // plan.file_bytes
    kept = int(KEPT_SHARE * num_blocks - 2) * group.block_size - 2 * step_tokens
    if kept < unit:
        least = (unit + 2 * step_tokens) / group.block_size + 3
        raise StartupError(
            f"--kv-spill needs {int(least / KEPT_SHARE)} KV-cache blocks at least, and there are"
            f" {num_blocks}: raise --cache-memory or lower --max-num-batched-tokens"
        )
    if num_units * unit < num_blocks * group.block_size:
        raise StartupError(
            f"--kv-spill-space of {settings.kv_spill_space:g} GiB holds {num_units * unit} tokens,"
            f" and the KV cache {num_blocks * group.block_size}: raise it"
        )
    return replace(plan, num_units=num_units), replace(group, kept=kept, unit=unit)


def open_spill(directory: Path, plan: SpillPlan) -> SpillFile:
    """Make the file in a directory.

    Raises:
        StartupError: The directory cannot be used, or its file system has too little space.
    """
    try:
        return SpillFile(directory, plan)
    except OSError as error:
        raise StartupError(
            f"--kv-spill {directory}: {error.strerror}; it needs"
            f" {plan.file_bytes / GIB:.1f} GiB (--kv-spill-space)"
        ) from error


def _check_supported(layout: CacheLayout, device: torch.device) -> None:
    """Refuse what the kernels do not read from a file."""
    shape = layout.shape
    if device.type != "cpu":
        raise StartupError("--kv-spill works on CPUs only: use --device cpu, or leave it out")
    if cpu.spill is None:
        raise StartupError(f"--kv-spill needs the compiled CPU kernels: {cpu.warning}")
    if len(layout.groups) != 1 or shape.states or layout.groups[0].bounded:
        raise StartupError("--kv-spill does not work with this model's windows or states yet")
    if any(layer.latent or layer.source is not None for layer in shape.layers):
        raise StartupError("--kv-spill does not work with latent or shared keys and values yet")
