"""The dtypes of weights and of the KV cache, from their settings."""

import torch
from transformers import PreTrainedConfig

from octavo.kernels.gpu import describe_gpu, e4m3_dtype


def checkpoint_dtype(config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype of a checkpoint's weights, as its config has it; float32 if it has none."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def choose_dtype(name: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Return the dtype for `auto` or a dtype's name.

    `auto` is the checkpoint's dtype, except that on a CPU bfloat16 replaces float16, which is slow
    on CPUs. Without Octavo's linear kernels, a CPU without AVX-512 uses float32, as PyTorch's
    bfloat16 is slow on it.
    """
    if name != "auto":
        chosen = getattr(torch, name)
        assert isinstance(chosen, torch.dtype)
        return chosen
    config_dtype = checkpoint_dtype(config)
    if device.type == "cpu" and config_dtype is not torch.float32:
        from octavo.kernels.cpu import linear  # noqa: PLC0415 - it compiles the kernels

        native = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        return torch.bfloat16 if linear is not None or native else torch.float32
    return config_dtype


def choose_cache_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of a device's KV cache.

    Args:
        name: Value of `EngineSettings.kv_cache_dtype`; devices have different types for fp8_e4m3.
        dtype: Dtype of the weights, used for `auto`.
        device: The cache's device.
    """
    if name == "fp8":
        has = device.type != "cuda" or describe_gpu(device).e4m3
        return e4m3_dtype(device) if has else torch.float8_e5m2
    if name == "fp8_e4m3":
        return e4m3_dtype(device)
    return {"fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}.get(name, dtype)
