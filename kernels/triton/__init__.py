"""The kernels on GPU, in Triton."""

from octavo.kernels.scores import score_tokens
from octavo.kernels.triton.copy_blocks import copy_blocks, swap_blocks
from octavo.kernels.triton.draw_tokens import argmax, draw_tokens
from octavo.kernels.triton.paged_attention import paged_attention
from octavo.kernels.triton.plan import plan_attention
from octavo.kernels.triton.rotate_and_write import rotate_and_write
from octavo.kernels.triton.write_kv import write_kv

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
