"""The kernels for GPUs, in Triton."""

import torch

from octavo.kernels.gpu import E4M3_DTYPES, describe_gpu
from octavo.kernels.scores import score_tokens
from octavo.kernels.triton.assembler import choose_assembler
from octavo.kernels.triton.causal_conv import causal_conv
from octavo.kernels.triton.copy_blocks import copy_blocks, swap_blocks
from octavo.kernels.triton.draw_tokens import argmax, draw_tokens
from octavo.kernels.triton.fp8_linear import fp8_linear, has_fp8_products
from octavo.kernels.triton.gated_delta import gated_delta
from octavo.kernels.triton.low_rank import add_low_rank
from octavo.kernels.triton.mask_logits import mask_logits
from octavo.kernels.triton.paged_attention import paged_attention
from octavo.kernels.triton.plan import plan_attention, plan_room
from octavo.kernels.triton.quantized_experts import quantized_experts
from octavo.kernels.triton.quantized_linear import quantized_linear
from octavo.kernels.triton.rotate_and_write import rotate_and_write
from octavo.kernels.triton.selective_scan import selective_scan
from octavo.kernels.triton.ssd import ssd
from octavo.kernels.triton.write_kv import write_kv

path = "triton"
warning: str | None = None
MIN_CAPABILITY = (8, 0)
"""Minimum compute capability of an NVIDIA GPU: Ampere's."""
MISCOMPILED = {(10, 3): "B300 (compute capability 10.3)"}
"""GPUs for which Triton, up to 3.8 at least, adds chained products up wrongly (triton#10821)."""
AMD_ARCHS = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
"""AMD GPUs whose matrix units Triton uses: CDNA 2 to 4, RDNA 3 and 4."""


def check_device(device: torch.device, cache_dtype: torch.dtype | None) -> None:
    """Raise ValueError if a GPU cannot run the kernels; see `octavo.kernels.backend`.

    Otherwise choose the assembler of those that are compiled from now on.
    """
    if not torch.cuda.is_available():
        return
    gpu = describe_gpu(device)
    if gpu.is_amd and not gpu.arch.startswith(AMD_ARCHS):
        raise ValueError(
            f"the kernels need an AMD GPU of {', '.join(AMD_ARCHS)}, but this one is {gpu.arch}:"
            " use a CPU"
        )
    if not gpu.is_amd and gpu.capability < MIN_CAPABILITY:
        needed, has = (".".join(map(str, pair)) for pair in (MIN_CAPABILITY, gpu.capability))
        raise ValueError(
            f"the kernels need a GPU of compute capability {needed} or later, and this one has"
            f" {has}: use a CPU"
        )
    if not gpu.is_amd and gpu.capability in MISCOMPILED:
        raise ValueError(
            f"Triton compiles products for {MISCOMPILED[gpu.capability]} wrongly, and this GPU is"
            " one: use another GPU, or a CPU"
        )
    if cache_dtype in E4M3_DTYPES and cache_dtype != gpu.e4m3:
        raise ValueError(
            f"fp8_e4m3 needs a GPU with instructions for it, and the kernels use none on"
            f" {gpu.arch}: use fp8_e5m2"
        )
    choose_assembler(gpu)


__all__ = [
    "add_low_rank",
    "argmax",
    "causal_conv",
    "check_device",
    "copy_blocks",
    "draw_tokens",
    "fp8_linear",
    "gated_delta",
    "has_fp8_products",
    "mask_logits",
    "paged_attention",
    "path",
    "plan_attention",
    "plan_room",
    "quantized_experts",
    "quantized_linear",
    "rotate_and_write",
    "score_tokens",
    "selective_scan",
    "ssd",
    "swap_blocks",
    "warning",
    "write_kv",
]
