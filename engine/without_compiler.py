"""Keeps unneeded packages, such as PyTorch's compiler, out of a CPU engine's process.

Transformers marks functions for the compiler when imported, which imports the compiler and its
libraries: half of the whole import time. A CPU engine compiles nothing.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

COMPILER = "torch._dynamo"
NEEDED = f"{COMPILER}._trace_wrapped_higher_order_op"
"""The only module of the compiler that transformers' masks need."""


def keep_compiler_out() -> None:
    """Import transformers without the compiler, distributed tensors and SciPy.

    Other names of the first two than those given here import them on use.
    """
    marks = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _mark)
    compiler = _Placeholder(COMPILER, marks)
    compiler.__path__ = [str(Path(torch.__path__[0]) / "_dynamo")]
    sys.modules.setdefault(COMPILER, compiler)
    importlib.import_module(NEEDED)
    del compiler.__path__
    # PyTorch checks whether tensors of classes like `DeferredTensor` are instances of these.
    tensors = "torch.distributed.tensor"
    sys.modules.setdefault(tensors, _Placeholder(tensors, {"DTensor": _NoTensor}))
    with _unavailable():
        from transformers.utils import import_utils  # noqa: PLC0415 - not earlier

        import_utils.is_torch_distributed_available()  # it caches the answers
        import_utils.is_scipy_available()


@contextmanager
def _unavailable() -> Iterator[None]:
    """Make PyTorch's distributed package and SciPy appear unavailable."""
    distributed: Any = torch.distributed
    is_available = distributed.is_available
    distributed.is_available = lambda: False
    sys.modules.setdefault("scipy", cast("ModuleType", None))
    try:
        yield
    finally:
        distributed.is_available = is_available
        if sys.modules["scipy"] is None:
            del sys.modules["scipy"]


class _Placeholder(ModuleType):
    """A module that is imported when a name is used, except names with a stand-in.

    Args:
        name: The module's name.
        known: The stand-ins by name.
    """

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        super().__init__(name)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a module's
        if name == "__file__":  # `inspect` asks all modules
            raise AttributeError(name)
        module_name = self.__name__
        if sys.modules[module_name] is self:
            del sys.modules[module_name]
        return getattr(importlib.import_module(module_name), name)


class _NoTensor(torch.Tensor):
    """A class without instances."""


def _mark(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:  # noqa: ANN401
    """Replace a mark of the compiler: return the function unchanged, or a decorator."""
    return _mark if function is None else function
