"""The interface of a backend: the kernels for one type of device."""
# ruff: noqa: D102 - `ops` documents them

from functools import cache
from importlib import import_module
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from octavo.kernels import BACKENDS
from octavo.kernels.metadata import AttentionMetadata, AttentionPlan
from octavo.kernels.sampling_tensors import SamplingTensors
from octavo.kernels.scores import Scores


@runtime_checkable
class Backend(Protocol):
    """The functions of a package in `BACKENDS`; `octavo.kernels.ops` documents each.

    Attributes:
        warning: What makes the kernels slow on this machine and what to do about it, or None.
    """

    warning: str | None

    def check_device(self, device: torch.device, cache_dtype: torch.dtype | None) -> None:
        """Raise ValueError if a device cannot run the kernels.

        Args:
            device: The device.
            cache_dtype: The KV cache's fp8 dtype; None if it is the model's dtype.
        """

    def plan_attention(
        self,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: torch.device,
    ) -> AttentionPlan | None: ...

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        **scales: float,
    ) -> None: ...

    def rotate_and_write(  # noqa: PLR0917
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        **scales: float,
    ) -> Tensor: ...

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        alibi_slopes: Tensor | None,
        **scales: float,
    ) -> Tensor: ...

    def copy_blocks(self, cache: Tensor, pairs: Tensor) -> None: ...

    def swap_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None: ...

    def argmax(self, rows: Tensor) -> Tensor: ...

    def draw_tokens(self, logits: Tensor, sampling: SamplingTensors) -> Tensor: ...

    def score_tokens(self, logits: Tensor, tokens: Tensor, most: int) -> Scores: ...


@cache
def find_backend(device_type: str) -> Backend:
    """Return the kernels for a type of device, importing them on first use.

    Triton is only imported for CUDA tensors: a machine without it can run on a CPU.

    Raises:
        ValueError: There are none.
    """
    if device_type not in BACKENDS:
        raise ValueError(f"device {device_type!r} is not supported: use {' or '.join(BACKENDS)}")
    return cast("Backend", import_module(BACKENDS[device_type]))
