"""The interface of a backend: the kernels for one type of device."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from octavo.kernels import BACKENDS
from octavo.kernels.low_rank import LowRankBatch
from octavo.kernels.metadata import AttentionPlan
from octavo.kernels.quantized import QuantizedWeight
from octavo.kernels.sampling_tensors import SamplingTensors
from octavo.kernels.scores import Scores


@runtime_checkable
class Backend(Protocol):
    """The functions that each package in `BACKENDS` provides.

    `octavo.kernels.ops` documents them; `octavo.kernels.states` documents those of stateful layers.

    Attributes:
        path: Name of the kernels: "triton", "pytorch", or the instruction set of the C++ kernels,
            as isa.cpp names it ("avx2", "avx512-bf16", "neon").
        warning: Why the kernels are slow on this machine, and a remedy; None if they are not.
    """

    path: str
    warning: str | None

    def check_device(self, device: torch.device, cache_dtype: torch.dtype | None) -> None:
        """Raise ValueError if a device cannot run the kernels.

        Args:
            device: The device.
            cache_dtype: The KV cache's smaller dtype; None if it is the model's dtype.
        """

    plan_attention: Callable[..., AttentionPlan | None]
    plan_room: Callable[..., AttentionPlan | None]
    write_kv: Callable[..., None]
    rotate_and_write: Callable[..., Tensor]
    paged_attention: Callable[..., Tensor]
    copy_blocks: Callable[[Tensor, Tensor], None]
    swap_blocks: Callable[[Tensor, Tensor, Tensor], None]
    argmax: Callable[[Tensor], Tensor]
    mask_logits: Callable[[Tensor, np.ndarray, np.ndarray], None]
    add_low_rank: Callable[[Tensor, Tensor, LowRankBatch, int], None]
    quantized_linear: Callable[[Tensor, QuantizedWeight, Tensor | None, torch.dtype], Tensor]
    quantized_experts: Callable[..., Tensor]
    fp8_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    has_fp8_products: Callable[[torch.device, torch.dtype], bool]
    draw_tokens: Callable[[Tensor, SamplingTensors], Tensor]
    score_tokens: Callable[[Tensor, Tensor, int], Scores]
    causal_conv: Callable[..., Tensor]
    ssd: Callable[..., Tensor]
    gated_delta: Callable[..., Tensor]
    selective_scan: Callable[..., Tensor]


@cache
def find_backend(device_type: str) -> Backend:
    """Return the kernels for a type of device, importing them on first use.

    Only GPUs import Triton, so a CPU machine does not need it.

    Raises:
        ValueError: No kernels support this device type.
    """
    if device_type not in BACKENDS:
        raise ValueError(f"device {device_type!r} is not supported: use {' or '.join(BACKENDS)}")
    return cast("Backend", import_module(BACKENDS[device_type]))
