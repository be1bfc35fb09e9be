"""A segment of a trace: consecutive calls of Octavo's operators, as one program."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from octavo.engine.compilation.trace import VALUES, Size, merge_numbers, storage_of
from octavo.kernels import cpu
from octavo.kernels.cpu.program import Linear, Program, operator_name


class Segment:
    """Writes a segment's program.

    Args:
        constants: The trace's constants.
        owners: The first node of each memory, by the memory's identity.
    """

    def __init__(
        self, constants: Mapping[str, Tensor], owners: Mapping[int | None, fx.Node]
    ) -> None:
        self._constants = constants
        self._owners = owners
        self._program = cpu.programs.new()
        self._numbers: dict[fx.Node, int] = {}

    def write(
        self, inputs: Sequence[fx.Node], calls: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> Program:
        """Return the program.

        Args:
            inputs: The nodes of its inputs.
            calls: Its calls, in order.
            outputs: Calls whose results are used afterwards, in order.
        """
        for node in inputs:
            self._numbers[node] = self._program.input()
        frees = self._frees(calls, outputs)
        for call in calls:
            arguments = list(map(self._argument, arguments_of(call)))
            self._numbers[call] = self._program.call(
                operator_name(call.target), arguments, output=call in outputs
            )
            for made in frees.get(call, ()):
                self._program.free(self._numbers[made])
        return self._program.finish()

    def _frees(
        self, calls: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> dict[fx.Node, list[fx.Node]]:
        """Return the results whose memory can be freed after each call."""
        makers = {memory_of(call): call for call in calls}
        last = {call: call for call in calls}
        for call in calls:
            for source in call.all_input_nodes:
                if (maker := makers.get(memory_of(source))) is not None:
                    last[maker] = call
        frees: dict[fx.Node, list[fx.Node]] = {}
        for maker, call in last.items():
            if maker not in outputs:
                frees.setdefault(call, []).append(maker)
        return frees

    def _argument(self, value: Any) -> Any:  # noqa: ANN401 - any argument
        return self._number(value) if isinstance(value, fx.Node) else value

    def _number(self, node: fx.Node) -> int:
        """Return the number of a node's tensor; add a view if the node is one."""
        if (known := self._numbers.get(node)) is not None:
            return known
        values = node.meta[VALUES]
        if node.op == "get_attr":
            number = self._program.constant(self._constants[str(node.target)])
        else:
            owner = self._owners[memory_of(node)]
            number = self._number(owner)
            of_owner = owner.meta[VALUES]
            layout = layout_of(values)
            if layout != layout_of(of_owner):
                offset = merge_numbers(
                    [
                        one.storage_offset() - whole.storage_offset()
                        for one, whole in zip(values, of_owner, strict=True)
                    ]
                )
                sizes, strides = (list(map(_linear, numbers)) for numbers in layout[:2])
                place = sizes, strides, _linear(offset)
                number = self._program.view(number, values[0].dtype, place)
        self._numbers[node] = number
        return number


def arguments_of(call: fx.Node) -> list[Any]:
    """Return all arguments of an operator's call, in order, including defaults."""
    declared = call.target._schema.arguments  # type: ignore[union-attr] # noqa: SLF001
    passed = dict(zip((one.name for one in declared), call.args, strict=False)) | call.kwargs
    return [passed.get(one.name, one.default_value) for one in declared]


def memory_of(node: fx.Node) -> int | None:
    """Return the identity of the memory of a node's tensor, if it was traced."""
    values = node.meta.get(VALUES)
    return None if values is None else storage_of(values[0])


def layout_of(values: Sequence[Tensor]) -> tuple[list[Any], list[Any], Any]:
    """Return the sizes, strides and offset of a node's tensors, for any number of tokens."""
    sizes = [merge_numbers(sizes) for sizes in zip(*(one.shape for one in values), strict=True)]
    strides = [merge_numbers(all_) for all_ in zip(*(one.stride() for one in values), strict=True)]
    return sizes, strides, merge_numbers([one.storage_offset() for one in values])


def _linear(number: int | Size) -> Linear:
    if isinstance(number, Size):
        return Linear(number.constant, number.tokens, number.rows)
    return Linear(number)
