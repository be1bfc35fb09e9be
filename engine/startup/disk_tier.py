"""Names the layout of blocks, and opens the tier of the KV cache on disk."""

from pathlib import Path

from octavo.engine.kv_disk.block_files import BlockFiles
from octavo.engine.kv_disk.disk_tier import DiskTier
from octavo.engine.memory.cache_tensors import GIB
from octavo.engine.models.fingerprint import fingerprint
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.cache_plan import CachePlan, CacheSize
from octavo.engine.startup.capacity import StartupError
from octavo.engine.startup.load import Loaded
from octavo.kernels.ops import kernel_path

DECIDING = {"dtype", "kv_cache_dtype", "quantization", "compile", "max_model_len", "block_size"}
"""Settings that the contents of blocks depend on."""


def block_layout(
    settings: EngineSettings, path: Path, loaded: Loaded, plan: CachePlan, size: CacheSize
) -> str:
    """Return a name of all that blocks' contents depend on besides their keys.

    Returns:
        The name; empty if blocks cannot be shared: without prefix caching, without swap space to
        read them through, or with several ranks, which each have a part.
    """
    if not settings.enable_prefix_caching or not size.num_swap_blocks or loaded.leader is not None:
        return ""
    model = loaded.model
    deciding = settings.model_dump(include=DECIDING) | {
        "device": f"{model.device.type} {kernel_path(model.device)}",
        "types": f"{model.dtype} {model.cache_dtype}",
        "layout": repr(plan.layout.groups),
    }
    return fingerprint(path, deciding)


def open_disk_tier(settings: EngineSettings, layout: str, block_bytes: int) -> DiskTier | None:
    """Return the tier in `--kv-disk`; None without that setting.

    Args:
        settings: The engine's settings.
        layout: The blocks' layout from `block_layout`.
        block_bytes: Bytes per block.

    Raises:
        StartupError: The directory cannot be used, or there is no swap space to read through.
    """
    if settings.kv_disk is None:
        return None
    if not layout:
        raise StartupError("--kv-disk needs swap space, and no memory is left for it")
    limit = int(settings.kv_disk_space * GIB)
    try:
        return DiskTier(BlockFiles(settings.kv_disk, layout, block_bytes, limit))
    except OSError as error:
        raise StartupError(f"--kv-disk {settings.kv_disk}: {error.strerror}") from error
