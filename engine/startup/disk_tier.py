"""Opens the tier of the KV cache on disk."""

from octavo.engine.kv_disk.block_files import BlockFiles
from octavo.engine.kv_disk.disk_tier import DiskTier
from octavo.engine.memory.cache_tensors import GIB
from octavo.engine.models.fingerprint import fingerprint
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.cache_plan import CachePlan, CacheSize
from octavo.engine.startup.capacity import StartupError
from octavo.engine.startup.find_model import ModelFiles
from octavo.engine.startup.load import Loaded
from octavo.kernels.ops import kernel_path

DECIDING = {"dtype", "kv_cache_dtype", "quantization", "compile", "max_model_len", "block_size"}
"""Settings that the contents of blocks depend on."""


def open_disk_tier(
    settings: EngineSettings, files: ModelFiles, loaded: Loaded, plan: CachePlan, size: CacheSize
) -> DiskTier | None:
    """Return the tier in `--kv-disk`; None without that setting.

    Raises:
        StartupError: The directory cannot be used, or there is no swap space to read through.
    """
    if settings.kv_disk is None:
        return None
    if not size.num_swap_blocks:
        raise StartupError("--kv-disk needs swap space, and no memory is left for it")
    model = loaded.model
    deciding = settings.model_dump(include=DECIDING) | {
        "device": f"{model.device.type} {kernel_path(model.device)}",
        "types": f"{model.dtype} {model.cache_dtype}",
        "layout": repr(plan.layout.groups),
    }
    try:
        return DiskTier(
            BlockFiles(
                settings.kv_disk,
                fingerprint(files.path, deciding),
                plan.block_bytes,
                int(settings.kv_disk_space * GIB),
            )
        )
    except OSError as error:
        raise StartupError(f"--kv-disk {settings.kv_disk}: {error.strerror}") from error
