"""The kernels on CPU: compiled C++ where there is a compiler, else plain PyTorch."""

import logging

from octavo.kernels import scores
from octavo.kernels.cpu import fallback, fallback_draws
from octavo.kernels.cpu.native import NativeKernels

SLOW = (
    "the CPU kernels cannot be compiled, so attention runs in plain PyTorch and models stay"
    " uncompiled: decoding is several times slower"
)

_kernels: NativeKernels | None = None
warning: str | None = None
"""What makes the kernels slow, in a line, with what to do about it; None if nothing does."""
try:
    _kernels = NativeKernels()
except OSError as error:
    logging.getLogger(__name__).warning("%s: %s", SLOW, error)
    warning = f"{SLOW}: {str(error).partition(chr(10))[0]}"

if _kernels is not None:
    write_kv = _kernels.write_kv
    rotate_and_write = _kernels.rotate_and_write
    paged_attention = _kernels.paged_attention
    copy_blocks = _kernels.copy_blocks
    swap_blocks = _kernels.swap_blocks
    run_step = _kernels.run_step  # for compiled steps, which cannot do without
    run_greedy_step = _kernels.run_greedy_step  # likewise
    take_spent = _kernels.take_spent  # likewise
    argmax = _kernels.argmax
    draw_tokens = _kernels.draw_tokens
    score_tokens = _kernels.score_tokens
    pin_threads = _kernels.pin_threads
    linear = _kernels.linear if _kernels.linear.supported else None
else:
    write_kv = fallback.write_kv
    rotate_and_write = fallback.rotate_and_write
    paged_attention = fallback.paged_attention
    copy_blocks = fallback.copy_blocks
    swap_blocks = fallback.swap_blocks
    argmax = fallback.argmax
    draw_tokens = fallback_draws.draw_tokens
    score_tokens = scores.score_tokens
    pin_threads = fallback.pin_threads
    linear = None

__all__ = [
    "argmax",
    "copy_blocks",
    "draw_tokens",
    "linear",
    "paged_attention",
    "pin_threads",
    "rotate_and_write",
    "score_tokens",
    "swap_blocks",
    "warning",
    "write_kv",
]
