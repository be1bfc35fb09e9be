"""A CPU engine's process without PyTorch's compiler and other packages that it does not need.

Transformers marks functions for the compiler while it is imported, which imports the compiler and
its libraries: half of all the time that imports take. No CPU engine compiles anything.
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
"""A module of the compiler that transformers' masks use. It needs no other."""


def keep_compiler_out() -> None:
    """Import transformers without the compiler, distributed tensors and SciPy.

    Code that uses other names of the first two than those here imports them.
    """
    marks = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _mark)
    compiler = _Placeholder(COMPILER, marks)
    compiler.__path__ = [str(Path(torch.__path__[0]) / "_dynamo")]
    sys.modules.setdefault(COMPILER, compiler)
    importlib.import_module(NEEDED)
    del compiler.__path__
    # PyTorch asks whether a tensor of a class like `DeferredTensor` is one of these.
    tensors = "torch.distributed.tensor"
    sys.modules.setdefault(tensors, _Placeholder(tensors, {"DTensor": _NoTensor}))
    with _unavailable():
        from transformers.utils import import_utils  # noqa: PLC0415 - not before

        import_utils.is_torch_distributed_available()  # it remembers the answers
        import_utils.is_scipy_available()


@contextmanager
def _unavailable() -> Iterator[None]:
    """Let PyTorch's distributed package and SciPy be unavailable."""
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
    """A module that is imported when one of its names is used, but for some that have a stand-in.

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
    """A class that no tensor has."""


def _mark(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:  # noqa: ANN401
    """Stand in for a mark of the compiler: return the function unchanged, or a decorator."""
    return _mark if function is None else function
