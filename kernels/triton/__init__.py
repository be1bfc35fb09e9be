"""The kernels on GPU, in Triton."""

from kernels.scores import score_tokens
from kernels.triton.copy_blocks import copy_blocks, swap_blocks
from kernels.triton.draw_tokens import argmax, draw_tokens
from kernels.triton.paged_attention import paged_attention
from kernels.triton.plan import plan_attention
from kernels.triton.rotate_and_write import rotate_and_write
from kernels.triton.write_kv import write_kv

__all__ = [
    "argmax",
    "copy_blocks",
    "draw_tokens",
    "paged_attention",
    "plan_attention",
    "rotate_and_write",
    "score_tokens",
    "swap_blocks",
    "write_kv",
]
