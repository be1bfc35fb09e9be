"""To a device and back, without the host's waiting for what that is doing."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy to a device, after what that was given before; on the host it copies nothing."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":  # from pageable memory, the host would wait for the stream
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


class Arriving:
    """A tensor on its way to the host.

    Args:
        tensor: Of which a copy is on its way from now on.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            # Blocking: who waits leaves the core to others.
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._arrived.record()

    def tolist(self) -> list[Any]:
        """Its elements, as `Tensor.tolist`; waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()
