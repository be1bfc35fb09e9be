"""Keeps unneeded packages, such as PyTorch's compiler, out of a CPU engine's process.

Transformers marks functions for the compiler when imported, which imports the compiler and its
libraries: half of the whole import time. A CPU engine compiles nothing.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

COMPILER = "torch._dynamo"
NEEDED = f"{COMPILER}._trace_wrapped_higher_order_op"
"""The only module of the compiler that transformers' masks need."""

TRANSFORMERS = "transformers"
HOMES = {
    "AttentionInterface": "modeling_utils",
    "AttentionMaskInterface": "masking_utils",
    "AutoConfig": "models.auto.configuration_auto",
    "AutoModelForCausalLM": "models.auto.modeling_auto",
    "AutoModelForImageTextToText": "models.auto.modeling_auto",
    "GenerationConfig": "generation.configuration_utils",
    "PreTrainedConfig": "configuration_utils",
    "PreTrainedModel": "modeling_utils",
}
"""The submodules of what Octavo imports from transformers."""


def _true(first: object, *others: object) -> bool:
    return all((first, *others))


def _equal(first: Any, other: Any) -> bool:  # noqa: ANN401 - a size, or a list or tuple of sizes
    return first == other if isinstance(first, int) else [*first] == [*other]


SIZES = "torch.fx.experimental.symbolic_shapes"
OF_SIZES: Mapping[str, Callable[..., Any]] = {
    "expect_true": bool,
    "guard_or_false": bool,
    "guard_or_true": bool,
    "guard_size_oblivious": bool,
    "guarding_hint_or_throw": lambda size: size,
    "has_guarding_hint": lambda _: True,
    "is_nested_int": lambda _: False,
    "statically_known_true": bool,
    "sym_and": _true,
    "sym_eq": _equal,
    "sym_or": lambda *conditions: any(conditions),
}
"""The compiler's functions of symbolic sizes, for sizes that are numbers. PyTorch calls them for
tensors on the meta device, and would import SymPy."""


def keep_compiler_out() -> None:
    """Import transformers without the compiler, distributed tensors, SymPy and SciPy.

    Other names of the first three than those given here import them on use.
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
    sys.modules.setdefault(SIZES, _Placeholder(SIZES, OF_SIZES))
    sys.modules.setdefault("sympy", _Placeholder("sympy", {"Basic": _NoSymbol}))
    # Importing these packages reads the files of all of transformers' models for their names.
    for package, homes in ((TRANSFORMERS, HOMES), (f"{TRANSFORMERS}.models", {})):
        if package not in sys.modules:
            sys.modules[package] = _package(package, homes)
    with _unavailable():
        from transformers import utils  # noqa: PLC0415 - not earlier
        from transformers.utils import import_utils  # noqa: PLC0415

        # It would import the package a second time.
        vars(utils)["direct_transformers_import"] = lambda *_: sys.modules[TRANSFORMERS]
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
    """A module that is imported when a name is used, except names that are known.

    Args:
        name: The module's name.
        known: Stand-ins, by name.
        homes: The submodules that names are from. If the module is a package, its submodules are
            known too.
    """

    def __init__(
        self, name: str, known: Mapping[str, Any], homes: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(name)
        vars(self).update(known)
        self._homes = homes or {}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a module's
        if name == "__file__" or (name == "__path__" and self.__name__ == SIZES):
            # `inspect` asks all modules for the first, and imports for the second.
            raise AttributeError(name)
        module_name = self.__name__
        if home := self._homes.get(name):
            return getattr(importlib.import_module(f"{module_name}.{home}"), name)
        if "__path__" in vars(self) and find_spec(f"{module_name}.{name}"):
            return importlib.import_module(f"{module_name}.{name}")
        if sys.modules[module_name] is self:
            del sys.modules[module_name]
        return getattr(importlib.import_module(module_name), name)


def _package(name: str, homes: Mapping[str, str]) -> _Placeholder:
    """Return the placeholder of a package that is installed."""
    spec = find_spec(name)
    assert spec is not None
    known = {
        "__spec__": spec,
        "__file__": spec.origin,
        "__path__": spec.submodule_search_locations,
        "__version__": version(TRANSFORMERS),
    }
    return _Placeholder(name, known, homes)


class _NoTensor(torch.Tensor):
    """A class without instances."""


class _NoSymbol:
    """A class that no object has."""


def _mark(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:  # noqa: ANN401
    """Replace a mark of the compiler: return the function unchanged, or a decorator."""
    return _mark if function is None else function
