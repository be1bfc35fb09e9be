"""The kernels for CPUs: C++ if there is a compiler, else plain PyTorch."""

import logging

import torch

from octavo.kernels import scores
from octavo.kernels.cpu import fallback, fallback_draws
from octavo.kernels.cpu.native import NativeKernels

SLOW = (
    "the CPU kernels cannot be compiled, so attention runs in plain PyTorch and models stay"
    " uncompiled: decoding is several times slower"
)

_kernels: NativeKernels | None = None
warning: str | None = None
"""See `octavo.kernels.backend.Backend`."""
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
    run_step = _kernels.run_step  # only for compiled steps, which need the C++ kernels
    run_greedy_step = _kernels.run_greedy_step
    take_spent = _kernels.take_spent
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


def check_device(_: torch.device, cache_dtype: torch.dtype | None) -> None:
    """Raise ValueError if the kernels cannot run; see `octavo.kernels.backend`."""
    if cache_dtype is not None:
        raise ValueError("an fp8 KV cache needs a GPU: CPUs have no arithmetic for it")


def plan_attention(*_: object, **__: object) -> None:
    """Return None: the C++ kernels plan each call themselves."""


__all__ = [
    "argmax",
    "check_device",
    "copy_blocks",
    "draw_tokens",
    "linear",
    "paged_attention",
    "pin_threads",
    "plan_attention",
    "rotate_and_write",
    "score_tokens",
    "swap_blocks",
    "warning",
    "write_kv",
]
