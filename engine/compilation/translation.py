"""Translates a captured step to TorchScript, for machines without a C++ compiler.

PyTorch's interpreter runs a TorchScript module without Python, and calls Octavo's kernels through
its dispatcher (`octavo_native::*`, operators.cpp). What is fused into the kernels is so fused here
too; only loops that Inductor would make of other operators stay apart.
"""

import math
import operator
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, List, Optional  # noqa: F401, UP035 - names in TorchScript

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from octavo.engine.attention import packed_latents, state_operators
from octavo.engine.compilation.experts import GROUPED_PRODUCT
from octavo.engine.compilation.rotation import Node
from octavo.engine.models.experts import packed_experts
from octavo.engine.models.linear import packed_linear
from octavo.engine.models.linear.adapted_layers import ADD_ADAPTERS
from octavo.engine.ranks import collectives
from octavo.kernels import cpu

LIBRARY = "step.ts"
"""The module's file in an artifact."""
NAMESPACES = {"aten", "onednn", "mkldnn"}
"""Operators of PyTorch's own libraries: a process that loads the module has them."""
NATIVE = {
    torch.ops.octavo.paged_attention.default,
    packed_latents.OPERATOR,
    packed_experts.OPERATOR,
    ADD_ADAPTERS,
    collectives.OPERATOR,
    *state_operators.OPERATORS,
}
"""Octavo's operators that run without Python, besides linear layers."""
NONE = {"Optional[Tensor]": "self.none", "Optional[int]": "0", "Optional[float]": "0.0"}
"""What a native operator takes instead of None, by the type of the argument."""
ARITHMETIC = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//"}
"""Operators between sizes."""
ASSERTIONS = {
    torch.ops.aten._assert_scalar.default,  # noqa: SLF001 - has no public name
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}
"""Assertions about sizes, for compilers."""


class UntranslatableError(Exception):
    """A step calls what TorchScript cannot call without Python."""


def translate(exported: ExportedProgram, directory: Path) -> str:
    """Translate a graph, save it, and return the file's name.

    Args:
        exported: The graph.
        directory: Where to save it.

    Raises:
        UntranslatableError: TorchScript cannot run the graph.
        RuntimeError: TorchScript refuses the graph.
    """
    cpu.register_operators()
    with warnings.catch_warnings():
        # PyTorch warns that TorchScript gets no new features; it has nothing else that runs a
        # graph without Python, without a compiler and without the interpreter's lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.script(_module(_weights(exported)))
        module.define(_source(exported))
        module.save(str(directory / LIBRARY))  # type: ignore[no-untyped-call]
    return LIBRARY


def _module(weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a module of the weights, each as `weight_NAME`, and an empty tensor for none."""
    # Of a class of its own: TorchScript compiles a class's methods only once in a process.
    module: nn.Module = type("Step", (nn.Module,), {})()
    module.register_buffer("none", torch.empty(0))
    for name, weight in weights.items():
        module.register_buffer(f"weight_{name}", weight)
    return module.eval()


def _weights(exported: ExportedProgram) -> dict[str, Tensor]:
    """Return the weights that a graph reads, by the names of its placeholders.

    Raises:
        UntranslatableError: A weight cannot be saved.
    """
    stored = {**exported.state_dict, **exported.constants}
    specs = _input_specs(exported)
    weights = {
        node.name: stored[str(specs[node.name].target)].detach()
        for node in exported.graph.find_nodes(op="placeholder")
        if specs[node.name].kind is not InputKind.USER_INPUT and node.users
    }
    if any(weight.is_mkldnn for weight in weights.values()):
        raise UntranslatableError("weights in oneDNN's own layout cannot be saved")
    return weights


def _input_specs(exported: ExportedProgram) -> dict[str, InputSpec]:
    return {spec.arg.name: spec for spec in exported.graph_signature.input_specs}


def _source(exported: ExportedProgram) -> str:
    """Return the method `forward` of a graph's module."""
    specs, weights = _input_specs(exported), _weights(exported)
    lines, inputs = [], []
    for node in exported.graph.nodes:
        if node.op == "placeholder" and specs[node.name].kind is InputKind.USER_INPUT:
            inputs.append(f"{node.name}: Tensor")
        elif node.op == "placeholder" and node.name in weights:
            lines.append(f"{node.name} = self.weight_{node.name}")
        elif node.op == "call_function" and node.target not in ASSERTIONS:
            lines.append(f"{node.name} = {_call(node)}")
        elif node.op == "output":
            lines.append(f"return {_value(node.args[0][0])}")
    signature = f"def forward(self, {', '.join(inputs)}) -> Tensor:"
    return "\n    ".join([signature, *lines]) + "\n"


def _call(node: Node) -> str:
    """Return a node's expression.

    Raises:
        UntranslatableError: There is none.
    """
    target, values = node.target, [_value(given) for given in node.args]
    if target is torch.ops.aten.sym_size.int:
        return f"{values[0]}.size({values[1]})"
    if target in ARITHMETIC:
        return f"({values[0]} {ARITHMETIC[target]} {values[1]})"
    if target is operator.getitem:
        return f"{values[0]}[{values[1]}]"
    if target in NATIVE or target in packed_linear.OPERATORS:
        return f"torch.ops.octavo_native.{_name(target)}({', '.join(_native_arguments(node))})"
    if target is GROUPED_PRODUCT:  # PyTorch's kernel, without the shape function
        return f"torch.ops.aten._grouped_mm({', '.join(values)})"
    if not isinstance(target, OpOverload) or target.namespace not in NAMESPACES:
        raise UntranslatableError(f"the model calls {target}, which runs in Python only")
    return f"torch.ops.{target.namespace}.{_name(target)}({', '.join(_arguments(node))})"


def _name(target: OpOverload) -> str:
    name: str = target._schema.name  # noqa: SLF001 - has no public name
    return name.partition("::")[2]


def _arguments(node: Node) -> list[str]:
    """Return the arguments of one of PyTorch's operators."""
    declared = node.target._schema.arguments  # noqa: SLF001
    arguments = []
    for argument, given in zip(declared, node.args, strict=False):
        value = _value(given)
        if str(argument.real_type) == "List[Optional[Tensor]]":  # cannot be inferred
            value = f"torch.jit.annotate(List[Optional[Tensor]], {value})"
        arguments.append(value)
    return [*arguments, *(f"{name}={_value(given)}" for name, given in node.kwargs.items())]


def _native_arguments(node: Node) -> list[str]:
    """Return the arguments of one of Octavo's operators, all of them."""
    declared = node.target._schema.arguments  # noqa: SLF001
    given = dict(zip((one.name for one in declared), node.args, strict=False)) | node.kwargs
    arguments = []
    for one in declared:
        value, kind = given.get(one.name, one.default_value), str(one.real_type)
        if value is None:
            arguments.append(NONE[kind])
        else:
            arguments.append(_value(float(value) if "float" in kind else value))
    return arguments


def _value(given: Any) -> str:  # noqa: ANN401 - whatever a graph holds
    """Return an argument's expression."""
    if isinstance(given, fx.Node):
        return str(given.name)
    if isinstance(given, list | tuple):
        return f"[{', '.join(map(_value, given))}]"
    if isinstance(given, float) and not math.isfinite(given):
        return f"float({str(given)!r})"
    if isinstance(given, torch.device):
        return f"torch.device({str(given)!r})"
    if isinstance(given, torch.dtype | torch.layout | torch.memory_format):
        return str(given)
    return repr(given)
