"""A compiled model's library, called through its C interface.

PyTorch's own runner holds the interpreter's lock while the model runs: no other thread could
receive requests or send tokens, and a step's tokens would wait for the end of the next step. ctypes
releases the lock.
"""

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.engine.attention.operator import PagedStep
from octavo.engine.models.linear.adapted_layers import current_adapters
from octavo.kernels import cpu
from octavo.kernels.cpu.native import CheckedCaches, CompiledInputs, CompiledModel

_aoti = torch._C._aoti  # noqa: SLF001 - has no public name
_python = ctypes.pythonapi
_python.PyCapsule_New.argtypes = (c_void_p, c_char_p, c_void_p)
_python.PyCapsule_New.restype = ctypes.py_object


class _Entry(Structure):
    """A constant; the same as AOTInductorConstantMapEntry."""

    _fields_ = (("name", c_char_p), ("tensor", c_void_p))


class LatestCaches:
    """The checked caches of a model's latest step.

    Args:
        dtype: Of the model.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._checked: CheckedCaches | None = None

    def check(self, within: PagedStep) -> CheckedCaches:
        """Return a step's caches, checked if they are not the latest."""
        checked = self._checked
        if checked is None or not checked.are_of(within.layers, within.states):
            checked = self._checked = CheckedCaches(
                within.layers, within.states, self._dtype, within.kv_scales
            )
        return checked


class Container:
    """A library that AOTInductor compiled for CPU, loaded with its weights.

    Args:
        path: The library.
        dtype: Of the model.

    Raises:
        OSError: The library cannot be loaded.
        RuntimeError: Its weights cannot be loaded.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._library = ctypes.CDLL(str(path))
        run = ctypes.cast(self._library.AOTInductorModelContainerRun, c_void_p)
        self._model = CompiledModel(run, c_void_p())
        self._caches = LatestCaches(dtype)
        create = self._function("CreateWithDevice", POINTER(c_void_p), c_size_t, c_char_p, c_char_p)
        _check(create(byref(self._model.container), 1, b"cpu", None), f"{path} cannot be loaded")

    def __call__(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, within: PagedStep
    ) -> Tensor:
        """Run the model, without the interpreter's lock.

        Args:
            token_ids: `[1, num_tokens]` int64, contiguous.
            positions: `[1, num_tokens]` int64, contiguous.
            logit_rows: `[num_rows]` int64, contiguous.
            within: The batch and the KV cache.

        Returns:
            `[num_rows, vocab_size]`.

        Raises:
            RuntimeError: The model failed; its message is on the process's stderr.
        """
        inputs = self._inputs(token_ids, positions, logit_rows, within)
        return _take_tensors(cpu.run_step(self._model, inputs))[0]

    def most_likely(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        within: PagedStep,
        masks: Mapping[int, np.ndarray],
    ) -> list[int]:
        """Run the model; return each row's most likely token that its mask allows."""
        inputs = self._inputs(token_ids, positions, logit_rows, within)
        return cpu.run_greedy_step(self._model, inputs, masks)

    def _inputs(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, within: PagedStep
    ) -> CompiledInputs:
        caches = self._caches.check(within)
        adapters = current_adapters()
        return CompiledInputs(caches, within.groups, token_ids, positions, logit_rows, adapters)

    def constants(self) -> list[Tensor]:
        """Return the weights in place; none if PyTorch is too old."""
        try:
            extract = self._function(
                "ExtractConstantsMapEntries",
                *(c_void_p, POINTER(POINTER(_Entry)), POINTER(c_size_t), c_bool),
            )
        except AttributeError:
            return []
        entries, count = POINTER(_Entry)(), c_size_t()
        _check(
            extract(self._model.container, byref(entries), byref(count), False),
            "the compiled model does not list its weights",
        )
        handles: list[c_void_p] = []
        for entry in entries[: count.value]:
            # Make a new handle, as the container keeps this one.
            own = c_void_p()
            _check(
                self._library.aoti_torch_new_tensor_handle(c_void_p(entry.tensor), byref(own)),
                "a weight cannot be read",
            )
            handles.append(own)
        return _take_tensors(*handles)

    def _function(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401 - ctypes'
        function = getattr(self._library, f"AOTInductorModelContainer{name}")
        function.argtypes, function.restype = arguments, c_int
        return function


def _take_tensors(*handles: c_void_p) -> list[Tensor]:
    """Return the tensors of handles, and take ownership of them."""
    capsules = [_python.PyCapsule_New(handle, None, None) for handle in handles]
    # The function for a single tensor leaks it.
    tensors: list[Tensor] = _aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)
    return tensors


def _check(failed: int, what: str) -> None:
    if failed:
        raise RuntimeError(what)
