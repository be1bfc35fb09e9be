"""Runs a traced step without Python's lock, so that other threads serve requests meanwhile.

Consecutive calls of Octavo's operators become a program of `octavo.kernels.cpu`; other operators
run in TorchScript's interpreter. Views need no extra call: a call takes a strided view of the
tensor that owns the memory.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any, List, Optional  # noqa: F401, UP035 - names in TorchScript

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.jit import optimized_execution  # type: ignore[attr-defined]

from octavo.engine.compilation.segment import Segment, layout_of, memory_of
from octavo.engine.compilation.trace import GETITEM, VALUES, Size, Trace, storage_of
from octavo.kernels import cpu
from octavo.kernels.cpu.program import Program, operator_name

GROUPED_PRODUCT = "transformers.grouped_mm_fallback.default"
"""Transformers' Python operator for products of experts; PyTorch's kernel computes the same."""
ENTRY = """\
def forward(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
    tokens = token_ids.size(1)
    rows = logit_rows.size(0)
"""


class UnscriptableError(Exception):
    """A step calls an operator that TorchScript cannot call without Python."""


class Script:
    """A traced step in TorchScript, with the arguments and results of a `Forward`.

    Args:
        traced: The step.

    Attributes:
        lines: The lines of TorchScript that run it, in order.

    Raises:
        UnscriptableError: TorchScript cannot run the graph.
        RuntimeError: TorchScript refuses the graph.
    """

    def __init__(self, traced: Trace) -> None:
        self.lines: list[str] = []
        self._programs: list[Program] = []  # kept alive, as the lines have their addresses
        self._constants: dict[str, Tensor] = {}
        self._traced = traced
        self._names: dict[fx.Node, str] = {}
        self._owners: dict[int | None, fx.Node] = {}  # memory's owner, by the first run's storages
        self._last_uses = _last_uses(traced.graph)
        self._waiting: list[fx.Node] = []  # calls of the next program
        for place, node in enumerate(traced.graph.nodes):
            self._add(node, place)
        with warnings.catch_warnings():
            # PyTorch warns that TorchScript is deprecated; but nothing else in it runs a graph
            # without Python, a compiler and the interpreter's lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            module: Any = torch.jit.script(_module(self._constants))
            module.define(ENTRY + "".join(f"    {line}\n" for line in self.lines))
        self._module = module

    def __call__(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        """Run the step."""
        # Its optimizations would specialize for sizes, which change from step to step.
        with optimized_execution(False):
            logits: Tensor = self._module(token_ids, positions, logit_rows)
        return logits

    def _add(self, node: fx.Node, place: int) -> None:
        values = node.meta.get(VALUES)
        if values is not None:
            owner = self._owners.setdefault(storage_of(values[0]), node)
            if owner is not node and node.op == "call_function" and _is_view(node, owner):
                return  # named when it is an argument
        if node.op == "get_attr":
            self._names[node] = f"self.{node.target}"
        elif node.op == "placeholder":
            self._names[node] = str(node.target)
        elif _is_native(node):
            self._waiting.append(node)
        else:
            if self._must_follow(node):
                self._add_program(place)
            if node.op == "output":
                self.lines.append(f"return {self._value(node.args[0])}")
            else:
                self._assign(node, self._call(node))

    def _must_follow(self, node: fx.Node) -> bool:
        """Return whether a node uses pending calls' results, or changes their arguments."""
        if node.op == "call_function" and _changes(node):
            return True
        made = set(map(memory_of, self._waiting))
        return not made.isdisjoint(map(memory_of, node.all_input_nodes))

    def _add_program(self, place: int) -> None:
        """Add a line with the pending calls, before the node with this index."""
        calls, self._waiting = self._waiting, []
        if not calls:
            return
        made = {memory_of(node) for node in calls}
        outputs = [node for node in calls if self._last_uses.get(memory_of(node), -1) >= place]
        segment = Segment(self._traced.constants, self._owners)
        read = [node for call in calls for node in call.all_input_nodes]
        sources = [self._source(node) for node in read if memory_of(node) not in made]
        parameters = [node for node in dict.fromkeys(sources) if node.op != "get_attr"]
        program = segment.write(parameters, calls, outputs)
        self._programs.append(program)
        arguments = [str(program.address), "tokens", "rows", *map(self._name, parameters)]
        self._names |= {node: node.name for node in outputs}
        results = ", ".join(node.name for node in outputs)
        call = f"torch.ops.octavo.{program.name}({', '.join(arguments)})"
        self.lines.append(f"{results} = {call}" if results else call)

    def _source(self, node: fx.Node) -> fx.Node:
        """Return a node if it has a name, else the node that owns its memory."""
        return node if node in self._names else self._owners[memory_of(node)]

    def _assign(self, node: fx.Node, expression: str) -> str:
        self.lines.append(f"{node.name} = {expression}")
        self._names[node] = node.name
        return node.name

    def _name(self, node: fx.Node) -> str:
        """Return a node's name; views get one when they are first used."""
        if (known := self._names.get(node)) is not None:
            if node.op == "get_attr":
                self._constants[str(node.target)] = self._traced.constants[str(node.target)]
            return known
        values = node.meta[VALUES]
        owner = self._owners[storage_of(values[0])]
        layout = layout_of(values)
        name = self._name(owner)
        if layout == layout_of(owner.meta[VALUES]):
            self._names[node] = name
            return name
        sizes, strides, offset = map(self._value, layout)
        if owner.op == "placeholder":  # the engine's inputs are views themselves
            offset = f"{name}.storage_offset() + {offset}"
        return self._assign(
            node, f"torch.ops.aten.as_strided({name}, {sizes}, {strides}, {offset})"
        )

    def _call(self, node: fx.Node) -> str:
        """Return a call's expression.

        Raises:
            UnscriptableError: The call needs Python.
        """
        target: Any = node.target
        if target is GETITEM:
            return f"{self._value(node.args[0])}[{node.args[1]}]"
        if str(target) == GROUPED_PRODUCT:
            values = [self._value(one) for one in (*node.args, *node.kwargs.values())]
            return f"torch.ops.aten._grouped_mm({', '.join(values)}, None, None)"
        if not isinstance(target, OpOverload) or target.namespace != "aten":
            raise UnscriptableError(f"the model calls {target}, which runs in Python only")
        return f"torch.ops.aten.{operator_name(target)}({self._arguments(node)})"

    def _arguments(self, node: fx.Node) -> str:
        """Return the arguments of one of PyTorch's operators."""
        declared = node.target._schema.arguments  # type: ignore[union-attr] # noqa: SLF001
        arguments = []
        for argument, operand in zip(declared, node.args, strict=False):
            value = self._value(operand)
            if str(argument.real_type) == "List[Optional[Tensor]]":  # cannot be inferred
                value = f"torch.jit.annotate(List[Optional[Tensor]], {value})"
            arguments.append(value)
        named = (f"{name}={self._value(operand)}" for name, operand in node.kwargs.items())
        return ", ".join((*arguments, *named))

    def _value(self, value: Any) -> str:  # noqa: ANN401 - whatever a graph holds
        """Return an argument's expression."""
        if isinstance(value, fx.Node):
            return self._name(value)
        if isinstance(value, Size):
            return _sum(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._value, value))}]"
        return _literal(value)


def _module(constants: Mapping[str, Tensor]) -> nn.Module:
    """Return a module of constants."""
    # Each module has a new class, as TorchScript compiles a class's methods only once per process.
    module: nn.Module = type("Forward", (nn.Module,), {})()
    for name, constant in constants.items():
        module.register_buffer(name, constant)
    return module.eval()


def _sum(size: Size) -> str:
    """Return a size's expression."""
    counts = ("tokens", size.tokens), ("rows", size.rows)
    terms = [name if factor == 1 else f"{factor} * {name}" for name, factor in counts if factor]
    return f"({' + '.join([*terms, *([str(size.constant)] if size.constant else [])])})"


def _literal(value: Any) -> str:  # noqa: ANN401 - whatever a graph holds
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    return repr(value)


def _is_native(node: fx.Node) -> bool:
    """Return whether a node calls one of Octavo's operators that programs call."""
    return isinstance(node.target, OpOverload) and cpu.programs.has(node.target)


def _changes(node: fx.Node) -> bool:
    """Return whether a call changes its arguments."""
    target: Any = node.target
    return target is not GETITEM and bool(target._schema.is_mutable)  # noqa: SLF001


def _is_view(node: fx.Node, owner: fx.Node) -> bool:
    """Return whether a node is just a view of another."""
    return not _changes(node) and node.meta[VALUES][0].dtype == owner.meta[VALUES][0].dtype


def _last_uses(graph: fx.Graph) -> dict[int | None, int]:
    """Return the index of the last node that uses each tensor's memory."""
    return {
        memory_of(source): place
        for place, node in enumerate(graph.nodes)
        for source in node.all_input_nodes
    }
