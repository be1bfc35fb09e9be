"""Traces a step: runs it a few times, and records the operators that it calls, with arguments.

Each run has other numbers of tokens and of rows. Values that differ between runs must be linear in
these two; any other difference cannot be traced. Octavo's operators do not run: their weights are
most of a model's, and their results do not matter. So a trace of 30 layers takes about a second,
however large they are.
"""

import mmap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.engine.attention.operator import DryRun, attending

RUNS = (5, 3), (7, 3), (7, 4), (11, 6)
"""Tokens and rows of the runs: the second changes the tokens, the third the rows, and the fourth
shows whether sizes are linear in them. No run has one token or row: for a dimension of 1, PyTorch
may call operators that are right for no other size."""
MANY = 1 << 16, 300
"""Tokens and rows of a last run without data, which computes nothing. It shows whether models call
other operators for many tokens, and whether a size has a bound."""
UNREAD_BYTES = 1 << 37
"""Bytes of address space that the last run reserves: more than any of its tensors."""
INPUTS = "token_ids", "positions", "logit_rows"
"""The last one is any column of `rows` numbers; where texts are embedded, their first tokens."""
VALUES = "values"
"""Key in a node's `meta` for its tensors in all runs."""
FOLDED_BYTES = 1 << 20
"""Maximum bytes of a tensor that depends only on weights and so is computed once."""
OTHER_ARGUMENTS = "it passes other arguments for other numbers of tokens"
MASKS = {torch.bool, torch.uint8}
READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
aten = torch.ops.aten


class UntraceableError(Exception):
    """The step's calls depend on more than its number of tokens and of rows."""


@dataclass(frozen=True, slots=True)
class Size:
    """A size that depends on a step's numbers of tokens and of rows.

    Attributes:
        constant: The constant part.
        tokens: Factor of the number of tokens.
        rows: Factor of the number of rows.
    """

    constant: int
    tokens: int
    rows: int

    def at(self, tokens: int, rows: int) -> int:
        """Return the size for numbers of tokens and of rows."""
        return self.constant + self.tokens * tokens + self.rows * rows


@dataclass(frozen=True, slots=True)
class Trace:
    """The calls of a step.

    Attributes:
        graph: The graph. Inputs are placeholders, and constants are `get_attr` nodes. Arguments of
            calls may be `Size`s, and `meta[VALUES]` has a node's tensors in the runs.
        constants: The constants, by name.
    """

    graph: fx.Graph
    constants: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator's call in one run."""

    operator: OpOverload
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    result: Any


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records all calls within the context.

    Args:
        known: The calls of an earlier run. With them no operator runs: calls that read data return
            the earlier result, and all others return tensors of the right sizes.

    Attributes:
        calls: The calls, in order.
    """

    def __init__(self, known: Sequence[_Call] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self._known = known
        self._unread = _Unread() if known else None

    def __torch_dispatch__(
        self,
        operator: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - operators' results
        del types
        kwargs = kwargs or {}
        if operator.namespace == "prim":  # of tensors without data
            return operator(*args, **kwargs)
        if self._known and _reads_data(operator, args):
            result = self._known[min(len(self.calls), len(self._known) - 1)].result
        elif self._unread is not None:
            result = _without_data(operator, args, kwargs, self._unread.tensor)
        elif operator.namespace == "octavo":
            result = _without_data(operator, args, kwargs, _zeros)
        else:
            result = operator(*args, **kwargs)
        self.calls.append(_Call(operator, (args, kwargs), result))
        return result


class _NoData(TorchFunctionMode):
    """Refuses functions that read data without an operator."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - functions' results
        del types
        if function in READS:
            raise UntraceableError("its Python code looks at data")
        return function(*args, **(kwargs or {}))


def _reads_data(operator: OpOverload, args: Sequence[Any]) -> bool:
    """Return whether an operator's result is a number or has a size that depends on data."""
    if operator is aten.index.Tensor:  # by a mask
        indices = [one.meta["val"] if isinstance(one, fx.Node) else one for one in args[1]]
        return any(one is not None and one.dtype in MASKS for one in indices)
    reading = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return not reading.isdisjoint(operator.tags)


def _without_data(
    operator: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    make: Callable[[Tensor], Tensor],
) -> Any:  # noqa: ANN401
    """Return a result with the sizes of an operator's.

    Args:
        operator: The operator, which is not run.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        make: Returns a tensor like one on the meta device.
    """
    originals: dict[int, Tensor] = {}

    def on_meta(tensor: Tensor) -> Tensor:
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        originals[id(like)] = tensor  # an operator may return its argument
        return like

    if kwargs.get("device") is not None:
        kwargs = kwargs | {"device": torch.device("meta")}

    def off_meta(made: Tensor) -> Tensor:
        if not made.is_meta:
            return made
        return originals[id(made)] if id(made) in originals else make(made)

    named = {name: _map(on_meta, value) for name, value in kwargs.items()}
    return _map(off_meta, operator(*_map(on_meta, args), **named))


def _map(change: Callable[[Tensor], Tensor], value: Any) -> Any:  # noqa: ANN401 - an argument
    """Return an argument with each of its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return [_map(change, one) for one in value]
    return value


def _leaves(value: Any) -> Iterator[Any]:  # noqa: ANN401 - an argument
    """Yield all values in an argument, including nested ones."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _zeros(like: Tensor) -> Tensor:
    """Return zeros like a tensor on the meta device."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()


class _Unread:
    """Makes CPU tensors of any size that take no memory, as nothing reads or writes them."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, UNREAD_BYTES, flags, mmap.PROT_READ)  # no memory is committed for it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the memory is read-only
            self._all = torch.frombuffer(memory, dtype=torch.uint8)

    def tensor(self, like: Tensor) -> Tensor:
        """Return a tensor like one on the meta device."""
        return self._all.view(like.dtype).as_strided(like.shape, like.stride())


@torch.no_grad()
def trace(forward: nn.Module, vocab_size: int) -> Trace:
    """Trace a step on a CPU.

    Args:
        forward: The step.
        vocab_size: Number of tokens in the vocabulary.

    Returns:
        The trace, which is also right for one token and one row.

    Raises:
        UntraceableError: Its calls depend on more than its number of tokens and of rows.
        Exception: The model raises it.
    """
    inputs, calls, results = [], [], []
    for run, (tokens, rows) in enumerate(RUNS):
        arguments = (
            ((torch.arange(tokens) * 7 + run) % vocab_size)[None],
            torch.arange(run, run + tokens)[None],
            torch.arange(rows) + (tokens - rows),
        )
        with _NoData():
            result, made = _run(forward, arguments)
        inputs.append(arguments)
        calls.append(made)
        results.append(result)
    _check_same(*calls)
    builder = _Builder(inputs)
    builder.add(list(zip(*calls, strict=True)))
    tokens, rows = MANY
    ids = torch.zeros((1, tokens), dtype=torch.int64)
    many = ids, torch.arange(tokens)[None], torch.arange(rows)
    _, last = _run(forward, many, calls[0])
    _check_same(calls[0], last)
    return builder.finish(results, last)


def _run(
    forward: nn.Module, inputs: tuple[Tensor, ...], known: Sequence[_Call] = ()
) -> tuple[Tensor, list[_Call]]:
    """Run a step; return its result and its calls."""
    with _compiling(), attending(DryRun()), _Recorder(known) as recorder:
        result: Tensor = forward(*inputs)
    return result, recorder.calls


def _check_same(*runs: Sequence[_Call]) -> None:
    """Refuse runs that call different operators."""
    if len({tuple(call.operator for call in calls) for calls in runs}) > 1:
        raise UntraceableError("it calls other operators for other numbers of tokens")


@contextmanager
def _compiling() -> Iterator[None]:
    """Let models see that they are traced, as in PyTorch; otherwise some look at data."""
    compiler: Any = torch.compiler
    compiler._is_compiling_flag = True  # noqa: SLF001 - no public name
    try:
        yield
    finally:
        compiler._is_compiling_flag = False  # noqa: SLF001 - no public name


class _Builder:
    """Merges the calls of several runs into one graph."""

    def __init__(self, inputs: Sequence[tuple[Tensor, ...]]) -> None:
        self._graph = fx.Graph()
        self._constants: dict[str, Tensor] = {}
        self._constant_storages: set[int] = set()
        self._nodes: dict[tuple[int, ...], fx.Node] = {}  # by the ids of their tensors
        self._places: dict[fx.Node, int] = {}  # of the calls that nodes' tensors come from
        for name, values in zip(INPUTS, zip(*inputs, strict=True), strict=True):
            self._keep(self._graph.placeholder(name), values)

    def add(self, calls: Sequence[tuple[_Call, ...]]) -> None:
        """Add all calls."""
        for place, made in enumerate(calls):
            self._add(made, place)

    def finish(self, results: Sequence[Tensor], last: Sequence[_Call]) -> Trace:
        """Add the runs' results, and check them against the last run's calls.

        Raises:
            UntraceableError: A tensor's shape in the last run does not follow from the other runs.
        """
        self._graph.output(self._merge(results))
        self._graph.eliminate_dead_code()
        for node in self._graph.nodes:
            if (place := self._places.get(node)) is not None:
                result = last[place].result
                _check_shape(node, result if isinstance(result, Tensor) else result[node.args[1]])
        return Trace(self._graph, self._constants)

    def _add(self, made: tuple[_Call, ...], place: int) -> None:
        operator = made[0].operator
        args, kwargs = self._merge_all([call.arguments for call in made])
        values = tuple(call.result for call in made)
        if _is_constant(args, kwargs, operator) and self._fold(values):
            return
        if _reads_data(operator, args):
            raise UntraceableError(f"it calls {operator}, whose result depends on the data")
        self._check_writes(made[0])
        node = self._graph.call_function(operator, args, kwargs)
        if isinstance(values[0], Tensor):
            self._keep(node, values)
            self._places[node] = place
            return
        if len(set(map(len, values))) > 1:
            raise UntraceableError("it has other numbers of tensors for other numbers of tokens")
        for i, of_all in enumerate(zip(*values, strict=True)):
            if isinstance(of_all[0], Tensor):
                part = self._graph.call_function(_getitem, (node, i))
                self._keep(part, of_all)
                self._places[part] = place

    def _check_writes(self, made: _Call) -> None:
        """Refuse a call that changes a constant: it would change the next step."""
        schema = made.operator._schema  # noqa: SLF001 - no public name
        written = [
            node
            for declared, node in zip(schema.arguments, made.arguments[0], strict=False)
            if declared.alias_info is not None and declared.alias_info.is_write
        ]
        changed = {storage_of(one) for one in _leaves(written) if isinstance(one, Tensor)}
        if changed & self._constant_storages:
            raise UntraceableError("it changes a weight, or what is made of weights alone")

    def _keep(self, node: fx.Node, values: tuple[Tensor, ...]) -> None:
        node.meta[VALUES], node.meta["val"] = values, values[0]
        self._nodes[tuple(map(id, values))] = node

    def _fold(self, values: tuple[Any, ...]) -> bool:
        """Turn a call's result into a constant, if it is constant and small."""
        first = values[0]
        if not isinstance(first, Tensor):
            return isinstance(first, int | float)  # the model has computed with it
        is_view = storage_of(first) in self._constant_storages
        if first.nbytes > FOLDED_BYTES and not is_view:
            return False
        self._add_constant(values)
        return True

    def _add_constant(self, values: tuple[Tensor, ...]) -> fx.Node:
        name = f"constant_{len(self._constants)}"
        self._constants[name] = values[0].detach()
        self._constant_storages.add(storage_of(values[0]))
        node = self._graph.create_node("get_attr", name, name=name)
        self._keep(node, values)
        return node

    def _merge_all(self, arguments: Sequence[Any]) -> Any:  # noqa: ANN401
        """Merge the runs' arguments, including nested values, into one argument."""
        first = arguments[0]
        if not isinstance(first, list | tuple | dict):
            return self._merge(arguments)
        if any(type(one) is not type(first) or len(one) != len(first) for one in arguments):
            raise UntraceableError(OTHER_ARGUMENTS)
        if isinstance(first, dict):
            if any(one.keys() != first.keys() for one in arguments):
                raise UntraceableError(OTHER_ARGUMENTS)
            return {name: self._merge_all([one[name] for one in arguments]) for name in first}
        merged = [self._merge_all(column) for column in zip(*arguments, strict=True)]
        return merged if isinstance(first, list) else tuple(merged)

    def _merge(self, values: Sequence[Any]) -> Any:  # noqa: ANN401
        """Merge the runs' arguments into one argument."""
        first = values[0]
        if isinstance(first, Tensor):
            return self._node(tuple(values))
        return merge_numbers(values)

    def _node(self, values: tuple[Tensor, ...]) -> fx.Node:
        """Return the node of an argument's tensors in all runs; a new one if they are constants."""
        if (node := self._nodes.get(tuple(map(id, values)))) is not None:
            return node
        first = values[0]
        if any(value is not first and not _are_same(value, first) for value in values):
            raise UntraceableError("it computes something outside of PyTorch's operators")
        return self._add_constant(values)


def _getitem(values: Sequence[Tensor], i: int) -> Tensor:
    """Return one of an operator's results."""
    return values[i]


GETITEM = _getitem


def storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory."""
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - no public name
    return identity


def _check_shape(node: fx.Node, last: Tensor) -> None:
    """Refuse a node whose shape in the last run does not follow from the other runs."""
    shapes = zip(*(value.shape for value in node.meta[VALUES]), strict=True)
    for sizes, actual in zip(shapes, last.shape, strict=True):
        size = merge_numbers(sizes)
        if actual != (size.at(*MANY) if isinstance(size, Size) else size):
            raise UntraceableError("a size is not linear in the number of tokens")


def _are_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _is_constant(args: tuple[Any, ...], kwargs: dict[str, Any], operator: OpOverload) -> bool:
    """Return whether a call's result depends only on constants."""
    if operator._schema.is_mutable or torch.Tag.nondeterministic_seeded in operator.tags:  # noqa: SLF001
        return False
    leaves = _leaves([args, *kwargs.values()])
    return not any(
        isinstance(one, Size) or (isinstance(one, fx.Node) and one.op != "get_attr")
        for one in leaves
    )


def merge_numbers(values: Sequence[Any]) -> Any:  # noqa: ANN401 - an argument
    """Merge the runs' numbers into one: arguments other than tensors, or parts of a layout.

    Args:
        values: The number in each run.

    Raises:
        UntraceableError: They differ and are not linear in the numbers of tokens and rows.
    """
    first = values[0]
    if all(value == first and type(value) is type(first) for value in values):
        return first
    if not all(type(value) is int for value in values):
        raise UntraceableError("an argument depends on the number of tokens")
    (tokens_0, rows_0), (tokens_1, _), (_, rows_2), _ = RUNS
    tokens, left = divmod(values[1] - first, tokens_1 - tokens_0)
    rows = (values[2] - values[1]) // (rows_2 - rows_0)
    size = Size(first - tokens * tokens_0 - rows * rows_0, tokens, rows)
    fits = all(size.at(*run) == value for run, value in zip(RUNS, values, strict=True))
    if left or not fits:
        raise UntraceableError("a size is not linear in the number of tokens")
    return size


def call(graph: fx.Graph, operator: Callable[..., Any], *args: Any) -> fx.Node:  # noqa: ANN401
    """Add a view to a graph, with its tensors in all runs if it is a trace."""
    node = graph.call_function(operator, args)
    if all(VALUES in argument.meta for argument in args if isinstance(argument, fx.Node)):
        values = tuple(operator(*_of_run(args, run)) for run in range(len(RUNS)))
        node.meta[VALUES], node.meta["val"] = values, values[0]
    return node


def _of_run(args: tuple[Any, ...], run: int) -> Iterator[Any]:
    for argument in args:
        yield argument.meta[VALUES][run] if isinstance(argument, fx.Node) else argument
