"""The kernels for CPUs: C++ if there is a compiler, else their definitions in plain PyTorch."""

import logging
from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from octavo.kernels import quantized, reference, reference_states
from octavo.kernels.cpu import logits
from octavo.kernels.cpu.blocks import dequantize
from octavo.kernels.cpu.native import NativeKernels
from octavo.kernels.low_rank import StepAdapters
from octavo.kernels.low_rank import add_low_rank as add_low_rank_in_pytorch
from octavo.kernels.scores import score_tokens as score_tokens_in_pytorch

SLOW = (
    "the CPU kernels cannot be compiled, so attention runs in plain PyTorch and models in"
    " Python: decoding is several times slower"
)

_kernels: NativeKernels | None = None
warning: str | None = None
"""See `octavo.kernels.backend.Backend`."""
try:
    _kernels = NativeKernels()
except OSError as error:
    logging.getLogger(__name__).warning("%s: %s", SLOW, error)
    warning = f"{SLOW}: {str(error).partition(chr(10))[0]}"

_available = _kernels or reference
write_kv = _available.write_kv
rotate_and_write = _available.rotate_and_write
paged_attention = _available.paged_attention
copy_blocks = _available.copy_blocks
swap_blocks = _available.swap_blocks
_logits = reference if _kernels is None else logits
argmax = _logits.argmax
mask_logits = _logits.mask_logits
draw_tokens = _logits.draw_tokens
score_tokens = score_tokens_in_pytorch if _kernels is None else logits.score_tokens
_states = reference_states if _kernels is None else _kernels.states
causal_conv = _states.causal_conv
ssd = _states.ssd
gated_delta = _states.gated_delta
selective_scan = _states.selective_scan
quantized_linear = quantized.quantized_linear
quantized_experts = quantized.quantized_experts
fp8_linear = quantized.fp8_linear
has_fp8_products = quantized.has_fp8_products
add_low_rank = add_low_rank_in_pytorch if _kernels is None else _kernels.add_low_rank
latents = None if _kernels is None else _kernels.latents
linear = None if _kernels is None else _kernels.linear
experts = None if _kernels is None else _kernels.experts
blocks = None if _kernels is None else _kernels.blocks
rounding = None if _kernels is None else _kernels.rounding
spill = None if _kernels is None else _kernels.spill
sums = None if _kernels is None else _kernels.sums
dequantize_blocks = dequantize if _kernels is None else _kernels.blocks.dequantize
path = "pytorch" if _kernels is None else _kernels.isa
"""See `octavo.kernels.backend.Backend`."""
if _kernels is not None:  # for traced steps, which need the C++ kernels
    latent_attention = _kernels.latent_attention
    take_spent = _kernels.take_spent
    programs = _kernels.programs
    set_step = _kernels.set_step


def implement(operator: OpOverload) -> None:
    """Give an engine's operator its kernel on CPUs, if the C++ kernels are there."""
    if _kernels is not None:
        _kernels.programs.implement(operator)


def set_adapters(adapters: StepAdapters | None) -> object:
    """Set this thread's adapters; see `NativeKernels.set_adapters`."""
    return None if _kernels is None else _kernels.set_adapters(adapters)


def check_device(_: torch.device, cache_dtype: torch.dtype | None) -> None:
    """Raise ValueError if the kernels cannot run; see `octavo.kernels.backend`."""
    if cache_dtype == torch.float8_e4m3fnuz:
        raise ValueError("only AMD's GPUs have a KV cache of float8_e4m3fnuz")


def pin_threads(places: Sequence[Sequence[int]]) -> bool:
    """Pin threads; see `NativeKernels.pin_threads`. PyTorch alone cannot."""
    return _kernels is not None and _kernels.pin_threads(places)


def plan_attention(*_: object, **__: object) -> None:
    """Return None: the C++ kernels plan each call themselves."""


def plan_room(*_: object, **__: object) -> None:
    """Return None: see `plan_attention`."""
