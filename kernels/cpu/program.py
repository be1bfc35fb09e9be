"""Programs: calls of Octavo's operators that run without Python; see program.cpp."""

import struct
from collections.abc import Callable, Mapping, Sequence
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    addressof,
    byref,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_void_p,
)
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

MAX_DIMENSIONS = 8
FIRST_CONSTANT = 1 << 32
"""The number of a program's first constant; the others follow."""
ABSENT = -1
VIEW, FREE = -1, -2
DTYPES = "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64"
"""The types of constants."""


_LETTERS = {"Tensor": "t", "Optional[Tensor]": "o", "int": "i", "float": "f", "bool": "b"}
_registered: set[str] = set()
"""The operators of this process that run programs."""


class Linear(NamedTuple):
    """A size that is linear in a step's number of tokens and number of rows."""

    constant: int
    tokens: int = 0
    rows: int = 0


class View(Structure):
    """A tensor's memory; the same as in operators.h."""

    _fields_ = (
        *(("data", c_void_p), ("dtype", c_int32), ("dimensions", c_int32)),
        *(("sizes", c_int64 * MAX_DIMENSIONS), ("strides", c_int64 * MAX_DIMENSIONS)),
    )


class _Program(Structure):
    """A program; the same as in program.cpp."""

    _fields_ = (
        *(("words", c_void_p), ("constants", c_void_p)),
        *(("num_words", c_int64), ("num_tensors", c_int64)),
    )


@dataclass(frozen=True, slots=True)
class Program:
    """A finished program; `octavo::<name>` runs it, with `address` as the first argument.

    Attributes:
        name: Name of the operator that runs programs with this many inputs and outputs.
        address: The program's address, valid while this object lives.
        kept: The memory that the program points to.
    """

    name: str
    address: int
    kept: object = field(repr=False)


class Programs:
    """The operators of C++, which PyTorch and programs call.

    Args:
        library: The compiled kernels.

    Raises:
        OSError: PyTorch refuses the operators.
    """

    def __init__(self, library: CDLL) -> None:
        if library.octavo_define_operators():
            raise OSError("PyTorch refuses the CPU kernels' operators")
        self._implement = library.octavo_implement
        self._implement.argtypes, self._implement.restype = (c_int64,), c_int
        self._register = library.octavo_register_run
        self._register.argtypes, self._register.restype = (c_char_p, c_int, c_int), c_int
        self._dtypes = {
            getattr(torch, name): int(getattr(library, f"aoti_torch_dtype_{name}")())
            for name in DTYPES
        }
        named = library.octavo_operator
        named.argtypes, named.restype = (c_int64, POINTER(c_char_p)), c_char_p
        self._operators: dict[str, tuple[int, str]] = {}
        signature = c_char_p()
        while name := named(len(self._operators), byref(signature)):
            number = len(self._operators)
            self._operators[name.decode()] = number, (signature.value or b"").decode()

    def new(self) -> "ProgramBuilder":
        """Return an empty program."""
        return ProgramBuilder(self._operators, self._dtypes, self._run)

    def has(self, operator: OpOverload) -> bool:
        """Return whether one of PyTorch's operators is the engine's, and in C++."""
        return operator.namespace == "octavo" and operator_name(operator) in self._operators

    def implement(self, operator: OpOverload) -> None:
        """Make the operator of the same name in C++ the kernel of one of the engine's, on CPUs."""
        number, signature = self._operators[operator_name(operator)]
        types = "".join(map(_letter, operator._schema.arguments))  # noqa: SLF001
        if types != signature:
            raise TypeError(f"{operator} has arguments {types}, and {signature} in C++")
        if self._implement(number):
            raise RuntimeError(f"PyTorch refuses the kernel of {operator}")

    def _run(self, inputs: int, outputs: int) -> str:
        """Return the name of the operator that runs programs; register it the first time.

        Raises:
            RuntimeError: PyTorch refuses it; its message is on the process's stderr.
        """
        name = f"run_{inputs}_{outputs}"
        if name not in _registered:
            if self._register(name.encode(), inputs, outputs):
                raise RuntimeError(f"PyTorch refuses octavo::{name}")
            _registered.add(name)
        return name


class ProgramBuilder:
    """Builds a program. Its methods return tensors' numbers.

    Args:
        operators: Number and signature of each operator, by name.
        dtypes: PyTorch's numbers of dtypes.
        run: Returns the operator that runs programs with a number of inputs and of outputs.
    """

    def __init__(
        self,
        operators: Mapping[str, tuple[int, str]],
        dtypes: Mapping[torch.dtype, int],
        run: Callable[[int, int], str],
    ) -> None:
        self._operators = operators
        self._dtypes = dtypes
        self._run = run
        self._words: list[int] = []
        self._constants: list[Tensor] = []
        self._inputs = self._others = self._outputs = 0

    def input(self) -> int:
        """Add the next input; all inputs come before constants and calls."""
        self._inputs += 1
        return self._next()

    def constant(self, tensor: Tensor) -> int:
        """Add a constant tensor of one of `DTYPES`."""
        self._constants.append(tensor)
        return FIRST_CONSTANT + len(self._constants) - 1

    def call(self, name: str, arguments: Sequence[Any], *, output: bool = False) -> int:
        """Call an operator.

        Args:
            name: Its name in C++.
            arguments: Tensors' numbers, and plain numbers; None for an absent argument.
            output: Whether the result is the program's next output.
        """
        number, signature = self._operators[name]
        words = [word_of(*each) for each in zip(signature, arguments, strict=True)]
        made = self._next()
        self._words += [number, made, self._outputs if output else ABSENT, *words]
        self._outputs += output
        return made

    def view(self, tensor: int, dtype: torch.dtype, layout: tuple[Any, Any, Linear]) -> int:
        """Make a view of a tensor.

        Args:
            tensor: Its number.
            dtype: The dtype of both.
            layout: The view's sizes, its strides, and its offset in that tensor, in elements.
        """
        sizes, strides, offset = layout
        made = self._next()
        self._words += [VIEW, made, tensor, dtype.itemsize, len(sizes)]
        for number in (*sizes, *strides, offset):
            self._words += number
        return made

    def free(self, tensor: int) -> None:
        """Free a result's memory."""
        self._words += [FREE, tensor]

    def finish(self) -> Program:
        """Return the program."""
        words = (c_int64 * len(self._words))(*self._words)
        views = (View * len(self._constants))(*map(self._view, self._constants))
        made = _Program(addressof(words), addressof(views), len(words), self._others)
        name = self._run(self._inputs, self._outputs)
        return Program(name, addressof(made), (made, words, views, self._constants))

    def _next(self) -> int:
        self._others += 1
        return self._others - 1

    def _view(self, tensor: Tensor) -> View:
        rest = (0,) * (MAX_DIMENSIONS - tensor.dim())
        return View(
            *(tensor.data_ptr(), self._dtypes[tensor.dtype], tensor.dim()),
            *((c_int64 * MAX_DIMENSIONS)(*each, *rest) for each in (tensor.shape, tensor.stride())),
        )


def operator_name(operator: Any) -> str:  # noqa: ANN401 - an OpOverload
    """Return an operator's name without its namespace."""
    name: str = operator._schema.name  # noqa: SLF001 - no public name
    return name.partition("::")[2]


def _letter(argument: Any) -> str:  # noqa: ANN401 - an argument of a schema
    """Return the letter of an argument in C++'s signatures."""
    return _LETTERS[str(argument.type)]


def word_of(letter: str, value: Any) -> int:  # noqa: ANN401
    """Encode an argument as a word, by its letter in the operator's signature."""
    if letter == "f":
        bits: int = struct.unpack("q", struct.pack("d", value or 0.0))[0]
        return bits
    assert letter != "t" or value is not None
    if value is None:
        return ABSENT if letter == "o" else 0
    return int(value)
