"""The number of blocks of the KV cache, and the maximum length of a sequence."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from octavo.common.kv_cache.layer_groups import BlockBudget
from octavo.common.models.errors import ModelError
from octavo.common.resources import Memory
from octavo.engine.memory.cache_tensors import (
    GIB,
    blocks_in,
    default_cache_gib,
    default_swap_gib,
    memory_of,
)
from octavo.engine.memory.swap import staging_memory
from octavo.engine.settings import EngineSettings
from octavo.kernels.uncompiled import why_uncompiled

CPU_SEQS, CPU_BATCHED_TOKENS = 128, 512
GPU_SEQS, GPU_BATCHED_TOKENS = 256, 8192


class StartupError(Exception):
    """The engine cannot start with these settings; the message says what to change."""


def batch_size(settings: EngineSettings, device: torch.device) -> tuple[int, int]:
    """Return the maximum sequences and tokens of a step: the settings, or the device's defaults."""
    seqs, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    default_seqs, default_tokens = (
        (GPU_SEQS, GPU_BATCHED_TOKENS) if device.type == "cuda" else (CPU_SEQS, CPU_BATCHED_TOKENS)
    )
    seqs = seqs or min(default_seqs, tokens or default_seqs)
    return seqs, tokens or max(seqs, default_tokens)


@contextmanager
def naming_uncompiled() -> Iterator[None]:
    """Convert the error of a kernel that Triton cannot compile to a StartupError."""
    try:
        yield
    except Exception as error:
        if (why := why_uncompiled(error)) is None or isinstance(error, ModelError):
            raise
        raise StartupError(why) from error


def count_blocks(
    settings: EngineSettings,
    device: torch.device,
    block_bytes: int,
    num_swap_blocks: int,
    *,
    taken: int,
    memory: Memory | None = None,
) -> int:
    """Return the number of blocks on the device: the setting, or the default.

    Args:
        settings: The engine's settings.
        device: The cache's device.
        block_bytes: Bytes per block.
        num_swap_blocks: Number of blocks in swap space.
        taken: Bytes that the cache cannot use; see `default_cache_gib`.
        memory: The device's memory. Default: its current state.

    Raises:
        StartupError: The blocks do not fit.
    """
    if settings.num_blocks is not None:
        return settings.num_blocks
    memory = memory or memory_of(device)
    gib = settings.cache_memory
    if gib is None:
        gib = default_cache_gib(device, settings.gpu_memory_utilization, taken, memory)
        if device.type == "cuda":
            gib -= staging_memory(num_swap_blocks, block_bytes) / GIB
    available = memory.total / GIB
    if gib > available:
        raise StartupError(
            f"--cache-memory is {gib:g} GiB, but this process may use {available:.1f} GiB of the"
            " device's memory: lower it"
        )
    blocks = blocks_in(gib, block_bytes)
    if blocks < 1:
        raise StartupError(
            f"a KV-cache block needs {block_bytes / GIB:.4f} GiB, but the cache has {gib:.4f}:"
            " raise --cache-memory or lower --block-size"
        )
    return blocks


def count_swap_blocks(settings: EngineSettings, block_bytes: int) -> int:
    """Return the number of blocks in swap space: the setting, or the default.

    Args:
        settings: The engine's settings.
        block_bytes: Bytes per block.

    Raises:
        StartupError: The blocks do not fit.
    """
    gib = settings.swap_space
    if gib is None:
        gib = default_swap_gib()
    available = memory_of(torch.device("cpu")).total / GIB
    if gib > available:
        raise StartupError(
            f"--swap-space is {gib:g} GiB, but this process may use {available:.1f} GiB of memory:"
            " lower it"
        )
    return blocks_in(gib, block_bytes)


def longest_sequence(
    settings: EngineSettings, context: int, budget: BlockBudget, spilled: int = sys.maxsize
) -> int:
    """Return the maximum tokens of a sequence that the model, the settings and the cache allow.

    Args:
        settings: The engine's settings.
        context: Tokens of the model's context.
        budget: The cache's blocks.
        spilled: Maximum tokens of a sequence in blocks and the file of --kv-spill, if there is one.

    Raises:
        StartupError: The maximum is below the setting.
    """
    capacity = min(budget.capacity(context), spilled)
    asked = settings.max_model_len
    if asked is None:
        return min(context, capacity)
    if asked > context:
        raise StartupError(
            f"--max-model-len is {asked}, but the model's context is {context} tokens: lower it"
        )
    if asked > capacity:
        raise StartupError(
            f"--max-model-len is {asked}, but the cache holds {capacity} tokens: raise"
            " --cache-memory, --num-blocks or --kv-spill-space, or lower --max-model-len"
        )
    return asked


def keeps_blocks(settings: EngineSettings) -> bool:
    """Return whether the weights of a GGUF file stay in its blocks."""
    return settings.quantization == "none"
