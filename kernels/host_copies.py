"""Copies between host and device that do not block the host."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device, in the order of its stream; on a CPU, share its memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":  # from pageable memory the host would wait for the stream
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


class AsyncCopy:
    """An asynchronous copy of a tensor to the host.

    Args:
        tensor: The tensor, copied when the stream's earlier work is done.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._done: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            # Blocking: a waiting thread leaves its core to others.
            self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._done.record()

    def tolist(self) -> list[Any]:
        """Wait for the copy and return its elements, as `Tensor.tolist`."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.tolist()
