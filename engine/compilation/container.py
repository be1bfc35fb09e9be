"""A compiled model's library, by its own C interface.

PyTorch's runner for Python holds the interpreter's lock while the model runs: no other
thread could take requests or send tokens meanwhile, and what a step had drawn would wait
for the next one to end. ctypes lets the lock go.
"""

import ctypes
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.engine.attention.operator import PagedStep
from octavo.kernels import cpu
from octavo.kernels.cpu.native import CompiledInputs, CompiledModel, KnownLayers

_aoti = torch._C._aoti  # noqa: SLF001 - has no other name
_python = ctypes.pythonapi
_python.PyCapsule_New.argtypes = (c_void_p, c_char_p, c_void_p)
_python.PyCapsule_New.restype = ctypes.py_object


class _Entry(Structure):
    """A constant; mirrors AOTInductorConstantMapEntry."""

    _fields_ = (("name", c_char_p), ("tensor", c_void_p))


class Container:
    """A library that AOTInductor compiled for CPU, loaded with its weights.

    Args:
        path: the library.

    Raises:
        OSError: it cannot be loaded.
        RuntimeError: its weights cannot.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        run = ctypes.cast(self._library.AOTInductorModelContainerRun, c_void_p)
        self._model = CompiledModel(run, c_void_p())
        self._layers: KnownLayers | None = None  # the latest
        create = self._function("CreateWithDevice", POINTER(c_void_p), c_size_t, c_char_p, c_char_p)
        _check(create(byref(self._model.container), 1, b"cpu", None), f"{path} cannot be loaded")

    def __call__(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, within: PagedStep
    ) -> Tensor:
        """Runs the model, without the interpreter's lock.

        Args:
            token_ids: `[1, num_tokens]` int64, contiguous.
            positions: as `token_ids`.
            logit_rows: `[num_rows]` int64, contiguous.
            within: the step that it attends within.

        Returns:
            Tensor: `[num_rows, vocab_size]`.

        Raises:
            RuntimeError: it failed; what it says of that is on the process's stderr.
        """
        inputs = self._inputs(token_ids, positions, logit_rows, within)
        return _own(cpu.run_step(self._model, inputs))[0]

    def most_likely(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, within: PagedStep
    ) -> list[int]:
        """As a call, but returns the first of each row's most likely tokens."""
        return cpu.run_greedy_step(
            self._model, self._inputs(token_ids, positions, logit_rows, within)
        )

    def _inputs(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, within: PagedStep
    ) -> CompiledInputs:
        layers = self._layers
        if layers is None or layers.layers is not within.layers:
            layers = self._layers = KnownLayers(within.layers)
        return CompiledInputs(layers, within.metadata, token_ids, positions, logit_rows)

    def constants(self) -> list[Tensor]:
        """The weights, where they lie; none where PyTorch is too old to tell."""
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
            "the compiled model does not tell its weights",
        )
        handles: list[c_void_p] = []
        for entry in entries[: count.value]:
            # A handle of our own, for this one stays the container's.
            own = c_void_p()
            _check(
                self._library.aoti_torch_new_tensor_handle(c_void_p(entry.tensor), byref(own)),
                "a weight cannot be read",
            )
            handles.append(own)
        return _own(*handles)

    def _function(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401 - ctypes'
        function = getattr(self._library, f"AOTInductorModelContainer{name}")
        function.argtypes, function.restype = arguments, c_int
        return function


def _own(*handles: c_void_p) -> list[Tensor]:
    """The tensors of handles that are ours, which are given up."""
    capsules = [_python.PyCapsule_New(handle, None, None) for handle in handles]
    # That for a single one leaks it.
    tensors: list[Tensor] = _aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)
    return tensors


def _check(failed: int, what: str) -> None:
    if failed:
        raise RuntimeError(what)
