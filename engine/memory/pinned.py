"""Pins host memory of any size, so that a GPU copies to and from it asynchronously.

PyTorch's allocator of pinned memory rounds sizes up to a power of two: 40 GiB take 64. Memory
registered with the driver keeps its size.
"""

import weakref
from contextlib import suppress
from typing import Any

import torch

_DEFAULT_FLAGS = 0


def pin(tensor: torch.Tensor, *, owner: object) -> None:
    """Pin a tensor's memory until `owner` is freed.

    Args:
        tensor: A contiguous tensor in host memory; it must not outlive `owner`.
        owner: The object that holds the tensor.

    Raises:
        OSError: The driver cannot pin this much.
    """
    if tensor.nbytes == 0:  # the driver refuses it
        return
    address = tensor.data_ptr()
    code = int(_runtime().cudaHostRegister(address, tensor.nbytes, _DEFAULT_FLAGS))
    if code:
        gib = tensor.nbytes / (1 << 30)
        raise OSError(
            f"cannot pin {gib:.1f} GiB of host memory (driver error {code}): lower --swap-space"
        )
    weakref.finalize(owner, _unpin, address)


def _unpin(address: int) -> None:
    """Unpin memory once no copy uses it. After an error of the GPU there are no copies."""
    with suppress(RuntimeError):
        torch.cuda.synchronize()
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:  # noqa: ANN401 - a module without types
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
