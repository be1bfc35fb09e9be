"""Sums of small tensors over GPUs in one kernel: each GPU reads the parts of all others.

PyTorch's symmetric memory maps a buffer of each GPU into all of them. NCCL sends a small tensor in
several rounds, each with its latency. vLLM's custom all-reduce also reads all parts at once, up to
some size.
"""

from typing import Any

import torch
from torch import Tensor

MOST_BYTES = {2: 1 << 20, 4: 512 << 10, 8: 256 << 10}
"""Maximum bytes of a tensor, by the maximum number of ranks. Each rank reads the parts of all."""
DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes that the kernel adds."""
ALIGNMENT = 16


class OneShotSums:
    """A buffer that all ranks' GPUs can read.

    Args:
        group: Name of the ranks' process group.
        size: Number of ranks, at most 8.
        device: This rank's GPU.

    Raises:
        RuntimeError: The driver cannot share memory.
    """

    def __init__(self, group: str, size: int, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory  # noqa: PLC0415 - takes a second

        self._group = group
        self._most = next(most for ranks, most in MOST_BYTES.items() if size <= ranks)
        memory: Any = _symmetric_memory
        self._rendezvous = memory.rendezvous
        self._buffers: dict[torch.dtype, Tensor] = {
            dtype: memory.empty(self._most // dtype.itemsize, dtype=dtype, device=device)
            for dtype in DTYPES
        }

    def connect(self) -> None:
        """Map the buffers of all ranks; all of them call this.

        Raises:
            RuntimeError: These GPUs cannot read each other's memory.
        """
        for buffer in self._buffers.values():
            self._rendezvous(buffer, self._group)

    def takes(self, x: Tensor) -> bool:
        """Return whether it sums tensors of this shape and dtype; all ranks' are the same."""
        fits = 0 < x.nbytes <= self._most and x.nbytes % ALIGNMENT == 0
        return fits and x.dtype in self._buffers

    def add(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor that it `takes`, added in rank order."""
        if x.data_ptr() % ALIGNMENT:
            x = x.clone()
        buffer = self._buffers[x.dtype][: x.numel()].view(x.shape)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", self._group)
        return total
