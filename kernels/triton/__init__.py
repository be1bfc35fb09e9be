"""The kernels for CUDA GPUs, in Triton."""

import torch

from octavo.kernels.scores import score_tokens
from octavo.kernels.triton.copy_blocks import copy_blocks, swap_blocks
from octavo.kernels.triton.draw_tokens import argmax, draw_tokens
from octavo.kernels.triton.paged_attention import paged_attention
from octavo.kernels.triton.plan import plan_attention
from octavo.kernels.triton.rotate_and_write import rotate_and_write
from octavo.kernels.triton.write_kv import write_kv

warning: str | None = None
MIN_CAPABILITY = (8, 0)
"""The compute capability that Triton needs: Ampere's."""
FP8_E4M3_CAPABILITY = (8, 9)
"""The compute capability that converts e4m3; all convert e5m2."""


def check_device(device: torch.device, cache_dtype: torch.dtype | None) -> None:
    """Raise ValueError if a GPU cannot run the kernels; see `octavo.kernels.backend`."""
    checks = [(MIN_CAPABILITY, "the kernels need", "a CPU")]
    if cache_dtype == torch.float8_e4m3fn:
        checks.append((FP8_E4M3_CAPABILITY, "fp8_e4m3 needs", "fp8_e5m2"))
    if not torch.cuda.is_available():
        return
    found = torch.cuda.get_device_capability(device)
    for least, needs, instead in checks:
        if found < least:
            needed, has = (".".join(map(str, capability)) for capability in (least, found))
            raise ValueError(
                f"{needs} a GPU of compute capability {needed} or later, and this one has {has}:"
                f" use {instead}"
            )


__all__ = [
    "argmax",
    "check_device",
    "copy_blocks",
    "draw_tokens",
    "paged_attention",
    "plan_attention",
    "rotate_and_write",
    "score_tokens",
    "swap_blocks",
    "warning",
    "write_kv",
]
