"""Runs a traced step in PyTorch's interpreter of graphs, TorchScript's, without Python's lock.

So other threads receive requests and send tokens meanwhile. It calls Octavo's kernels through
PyTorch's dispatcher (`octavo_native::*`, operators.cpp). Views cost nothing of their own: an
operator takes a strided view of the tensor that owns the memory.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any, List, Optional  # noqa: F401, UP035 - names in TorchScript

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from octavo.engine.attention import packed_latents, state_operators
from octavo.engine.compilation.norms import RMS_NORM
from octavo.engine.compilation.trace import GETITEM, VALUES, Size, Trace, merge_numbers, storage_of
from octavo.engine.models.experts import packed_experts
from octavo.engine.models.linear import packed_linear
from octavo.engine.models.linear.adapted_layers import ADD_ADAPTERS
from octavo.engine.ranks import collectives
from octavo.kernels import cpu

NATIVE = {
    torch.ops.octavo.paged_attention.default,
    packed_latents.OPERATOR,
    packed_experts.OPERATOR,
    ADD_ADAPTERS,
    collectives.OPERATOR,
    RMS_NORM,
    *state_operators.OPERATORS,
}
"""Octavo's operators that run without Python, besides linear layers."""
NONE = {"Optional[Tensor]": "self.none", "Optional[int]": "0", "Optional[float]": "0.0"}
"""What a native operator takes instead of None, by the type of the argument."""
GROUPED_PRODUCT = "transformers.grouped_mm_fallback.default"
"""Transformers' operator in Python for products of experts, which PyTorch's kernel computes too."""
ENTRY = """\
def forward(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
    tokens = token_ids.size(1)
    rows = logit_rows.size(0)
"""


class UnscriptableError(Exception):
    """A step calls what TorchScript cannot call without Python."""


def script(traced: Trace) -> nn.Module:
    """Return a module that runs a traced step; it takes and returns what a `Step` does.

    Args:
        traced: The step.

    Raises:
        UnscriptableError: TorchScript cannot run the graph.
        RuntimeError: TorchScript refuses the graph.
    """
    cpu.register_operators()
    lines = _Lines(traced.graph).lines
    with warnings.catch_warnings():
        # PyTorch warns that TorchScript gets no new features; it has nothing else that runs a
        # graph without Python, without a compiler and without the interpreter's lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        module: Any = torch.jit.script(_module(traced.constants))
        module.define(ENTRY + "".join(f"    {line}\n" for line in lines))
    made: nn.Module = module
    return made


def _module(constants: Mapping[str, Tensor]) -> nn.Module:
    """Return a module of the constants, and an empty tensor for none."""
    # Of a class of its own: TorchScript compiles a class's methods only once in a process.
    module: nn.Module = type("Step", (nn.Module,), {})()
    module.register_buffer("none", torch.empty(0))
    for name, constant in constants.items():
        module.register_buffer(name, constant)
    return module.eval()


class _Lines:
    """The lines of TorchScript that run a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.lines: list[str] = []
        self._names: dict[fx.Node, str] = {}
        self._owners: dict[int, fx.Node] = {}  # of memory, by the first run's storages
        for node in graph.nodes:
            self._add(node)

    def _add(self, node: fx.Node) -> None:
        if node.op == "output":
            self.lines.append(f"return {self._value(node.args[0])}")
            return
        values = node.meta.get(VALUES)
        if values is not None:
            owner = self._owners.setdefault(storage_of(values[0]), node)
            if owner is not node and node.op == "call_function" and _is_view(node, owner):
                return  # once it is an argument
        if node.op == "get_attr":
            self._names[node] = f"self.{node.target}"
        elif node.op == "placeholder":
            self._names[node] = str(node.target)
        else:
            self._assign(node, self._call(node))

    def _assign(self, node: fx.Node, expression: str) -> str:
        self.lines.append(f"{node.name} = {expression}")
        self._names[node] = node.name
        return node.name

    def _name(self, node: fx.Node) -> str:
        """Return a node's name, once it has one: views get theirs as they are used."""
        if (known := self._names.get(node)) is not None:
            return known
        values = node.meta[VALUES]
        owner = self._owners[storage_of(values[0])]
        layout = _layout(values)
        if layout == _layout(owner.meta[VALUES]):
            name = self._names[node] = self._names[owner]
            return name
        sizes, strides, offset = map(self._value, layout)
        name = self._names[owner]
        if owner.op == "placeholder":  # the engine's inputs are views themselves
            offset = f"{name}.storage_offset() + {offset}"
        return self._assign(
            node, f"torch.ops.aten.as_strided({name}, {sizes}, {strides}, {offset})"
        )

    def _call(self, node: fx.Node) -> str:
        """Return a call's expression.

        Raises:
            UnscriptableError: There is none.
        """
        target: Any = node.target
        if target is GETITEM:
            return f"{self._value(node.args[0])}[{node.args[1]}]"
        if target in NATIVE or target in packed_linear.OPERATORS:
            return f"torch.ops.octavo_native.{_operator(target)}({self._native_arguments(node)})"
        if str(target) == GROUPED_PRODUCT:
            given = [self._value(one) for one in (*node.args, *node.kwargs.values())]
            return f"torch.ops.aten._grouped_mm({', '.join(given)}, None, None)"
        if not isinstance(target, OpOverload) or target.namespace != "aten":
            raise UnscriptableError(f"the model calls {target}, which runs in Python only")
        return f"torch.ops.aten.{_operator(target)}({self._arguments(node)})"

    def _arguments(self, node: fx.Node) -> str:
        """Return the arguments of one of PyTorch's operators."""
        declared = node.target._schema.arguments  # type: ignore[union-attr] # noqa: SLF001
        arguments = []
        for argument, given in zip(declared, node.args, strict=False):
            value = self._value(given)
            if str(argument.real_type) == "List[Optional[Tensor]]":  # cannot be inferred
                value = f"torch.jit.annotate(List[Optional[Tensor]], {value})"
            arguments.append(value)
        named = (f"{name}={self._value(given)}" for name, given in node.kwargs.items())
        return ", ".join((*arguments, *named))

    def _native_arguments(self, node: fx.Node) -> str:
        """Return the arguments of one of Octavo's operators, all of them."""
        declared = node.target._schema.arguments  # type: ignore[union-attr] # noqa: SLF001
        given = dict(zip((one.name for one in declared), node.args, strict=False)) | node.kwargs
        arguments = []
        for one in declared:
            value, kind = given.get(one.name, one.default_value), str(one.real_type)
            if value is None:
                arguments.append(NONE[kind])
            else:
                arguments.append(self._value(float(value) if "float" in kind else value))
        return ", ".join(arguments)

    def _value(self, given: Any) -> str:  # noqa: ANN401 - whatever a graph holds
        """Return an argument's expression."""
        if isinstance(given, fx.Node):
            return self._name(given)
        if isinstance(given, Size):
            return _sum(given)
        if isinstance(given, list | tuple):
            return f"[{', '.join(map(self._value, given))}]"
        return _literal(given)


def _sum(size: Size) -> str:
    """Return a size's expression."""
    counts = ("tokens", size.tokens), ("rows", size.rows)
    terms = [name if factor == 1 else f"{factor} * {name}" for name, factor in counts if factor]
    return f"({' + '.join([*terms, *([str(size.constant)] if size.constant else [])])})"


def _literal(given: Any) -> str:  # noqa: ANN401 - whatever a graph holds
    if isinstance(given, float) and not math.isfinite(given):
        return f"float({str(given)!r})"
    if isinstance(given, torch.device):
        return f"torch.device({str(given)!r})"
    if isinstance(given, torch.dtype | torch.layout | torch.memory_format):
        return str(given)
    return repr(given)


def _operator(target: Any) -> str:  # noqa: ANN401 - an OpOverload
    name: str = target._schema.name  # noqa: SLF001 - has no public name
    return name.partition("::")[2]


def _is_view(node: fx.Node, owner: fx.Node) -> bool:
    """Return whether a node is a view of another, and no more than that."""
    target: Any = node.target
    changes = target is not GETITEM and target._schema.is_mutable  # noqa: SLF001
    return not changes and node.meta[VALUES][0].dtype == owner.meta[VALUES][0].dtype


def _layout(values: tuple[Tensor, ...]) -> tuple[list[Any], list[Any], Any]:
    """Return the sizes, strides and offset of a node's tensors, for any number of tokens."""
    sizes = [merge_numbers(sizes) for sizes in zip(*(one.shape for one in values), strict=True)]
    strides = [merge_numbers(all_) for all_ in zip(*(one.stride() for one in values), strict=True)]
    return sizes, strides, merge_numbers([one.storage_offset() for one in values])
