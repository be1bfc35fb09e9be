"""Finds kernels' out-of-bounds accesses under Triton's interpreter.

A kernel may access only elements of its arguments: no memory beside them, and no gap between the
elements of a strided view. Guard pages would find only accesses behind a tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from octavo.kernels import triton as kernels
from octavo.kernels.low_rank import LowRankBatch


class OutOfBoundsError(AssertionError):
    """A kernel accesses memory outside its arguments."""


class _Bounds:
    """The memory that a launch may access."""

    def __init__(self) -> None:
        self._owners: list[torch.Tensor] = []
        self._starts = np.zeros(1, np.uint64)
        self._allowed = [np.zeros(1, np.bool_)]

    @contextmanager
    def reached_by_address(self, owners: Sequence[torch.Tensor]) -> Iterator[None]:
        """Allow tensors whose addresses the kernels read from other tensors."""
        self._owners.extend(owners)
        try:
            yield
        finally:
            self._owners.clear()

    def set(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allow a launch's tensors."""
        storages: dict[int, torch.Tensor] = {}
        for tensor in [*tensors, *self._owners]:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in storages:
                storages[storage.data_ptr()] = torch.zeros(storage.nbytes(), dtype=torch.bool)
            size = tensor.element_size()
            storages[storage.data_ptr()].as_strided(
                (*tensor.shape, size),
                (*(stride * size for stride in tensor.stride()), 1),
                tensor.storage_offset() * size,
            ).fill_(True)
        starts = sorted(storages)
        self._starts = np.array(starts, np.uint64)
        self._allowed = [storages[start].numpy() for start in starts]

    def check(self, addresses: Any, mask: Any, size: int) -> None:
        """Raise `OutOfBoundsError` if an access of `size` bytes is not allowed.

        Args:
            addresses: Addresses of the elements.
            mask: Whether each is accessed.
            size: Bytes of an element.
        """
        used = np.broadcast_to(addresses, np.shape(mask))[mask].astype(np.uint64)
        places = np.searchsorted(self._starts, used, "right").astype(np.int64) - 1
        for place in np.unique(places):
            allowed = self._allowed[place]
            first = used[places == place] - self._starts[place]
            ends = first + np.uint64(size - 1)
            if place < 0 or ends.max() >= len(allowed):
                raise OutOfBoundsError("outside the tensors")
            if not (allowed[first] & allowed[ends]).all():
                raise OutOfBoundsError("between the elements of a tensor's view")
            if (first % np.uint64(size)).any():
                raise OutOfBoundsError("not at a multiple of the element's size")


def guard() -> None:
    """Check all further launches in this process."""
    bounds = _Bounds()
    launcher, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    begin = launcher._init_args_hst

    @wraps(begin)
    def checked_launch(self: Any, args: Any, named: Any) -> Any:
        here = begin(self, args, named)
        given = [*here[0], *here[1].values()]
        bounds.set([each for each in given if isinstance(each, torch.Tensor)])
        return here

    def checked(name: str, position_of_mask: int) -> None:
        access: Callable[..., Any] = getattr(builder, name)

        @wraps(access)
        def run(self: Any, *given: Any) -> Any:
            size = interpreter._get_np_dtype(given[0].get_element_ty())
            bounds.check(given[0].data, given[position_of_mask].data, np.dtype(size).itemsize)
            return access(self, *given)

        setattr(builder, name, run)

    launcher._init_args_hst = checked_launch
    checked("create_masked_load", 1)
    checked("create_masked_store", 2)
    checked("create_atomic_rmw", 3)
    add = kernels.add_low_rank

    @wraps(add)
    def add_low_rank(out: torch.Tensor, x: torch.Tensor, batch: LowRankBatch, layer: int) -> None:
        with bounds.reached_by_address(batch.owners):
            add(out, x, batch, layer)

    kernels.add_low_rank = add_low_rank
