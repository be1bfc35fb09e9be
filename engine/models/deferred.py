"""Weights that stay in their files until they are used.

A `DeferredTensor` can compute its values, but does not store them. Operators on deferred tensors
alone are deferred too: transposing, joining or widening takes no memory. An operator with other
tensors computes the values, uses them and drops them. So a model with deferred weights gives the
same results as with all weights in memory, in little more memory than its largest weight. Products
with float32 inputs compute the weight in parts that stay in a core's cache.
Of embeddings, only the rows that are looked up are computed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_any, tree_leaves, tree_map

from octavo.engine.models.shard import Shard

if TYPE_CHECKING:
    from octavo.engine.models.quantization.formats.base import StoredWeight

SMALL = 1 << 16
"""Maximum elements of a weight that is read immediately."""
UNCHANGED = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
"""Operators that return the same values, like `CASTS`."""
CASTS = {torch.ops.aten._to_copy.default}  # noqa: SLF001 - no public name
STACK, CONCATENATE = torch.ops.aten.stack.default, torch.ops.aten.cat.default
LINEAR = torch.ops.aten.linear.default
EMBEDDING = torch.ops.aten.embedding.default
PART = 240 << 10
"""Elements of a weight's part in a product: less than `MAPPED_BYTES` of freed.py, so that each part
reuses the previous part's memory."""


class DeferredTensor(Tensor):
    """A tensor whose values are computed on every use.

    Attributes:
        make: Function that computes the values.
        stored: Function that reads a quantized weight or its shard; None of other weights.
        exact: Function that dequantizes a quantized weight to float32, rounding once; else None.
        rows: Function that computes a range of rows, in float32 for a quantized weight. None if
            only the whole can be computed.
        source: Operator, arguments and keyword arguments that compute it; None for a weight of a
            file.
    """

    make: Callable[[], Tensor]
    stored: "Callable[[], StoredWeight] | None"
    exact: Callable[[], Tensor] | None
    rows: Callable[[int, int], Tensor] | None
    source: tuple[Any, tuple[Any, ...], dict[str, Any]] | None

    @staticmethod
    def __new__(  # noqa: D102, PYI034 - as the class; torch's typing wants no Self here
        cls: type["DeferredTensor"],
        like: Tensor,
        make: Callable[[], Tensor],
        *,
        stored: "Callable[[], StoredWeight] | None" = None,
        device: torch.device | None = None,
        exact: Callable[[], Tensor] | None = None,
        rows: Callable[[int, int], Tensor] | None = None,
        source: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> "DeferredTensor":
        made: DeferredTensor = Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, like.shape, dtype=like.dtype, device=device or torch.device("cpu")
        )
        made.make, made.stored, made.exact, made.rows = make, stored, exact, rows
        made.source = source
        return made

    def __repr__(self) -> str:  # type: ignore[override] # torch's takes what it prints
        """Return a text without the values."""
        return f"DeferredTensor({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, _: dict[int, Any]) -> "DeferredTensor":
        """Return a tensor that computes the same values."""
        copied = self.detach()
        assert isinstance(copied, DeferredTensor)
        return copied

    @classmethod
    @torch.inference_mode(mode=False)  # inference mode forbids views of outside tensors
    @torch.no_grad()
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        operator: Any,  # noqa: ANN401 - torch has no public type for it
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if any(isinstance(each, DeferredTensor) for each in _written(operator, args, kwargs)):
            raise NotImplementedError(f"{operator} would change a weight that is in its file")
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        if all(isinstance(tensor, DeferredTensor) for tensor in tensors):
            made = _defer(operator, args, kwargs, tensors[0].device)
            if made is not None:
                return made
        if operator is LINEAR and _has_parts(args[1]):
            return _multiply(*args)
        if operator is EMBEDDING and isinstance(args[0], DeferredTensor) and args[0].rows:
            return _look_up(*args[:2])
        return operator(*tree_map(present, args), **tree_map(present, kwargs))


def _written(
    operator: Any,  # noqa: ANN401
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Any]:
    """Return the arguments that an operator writes to."""
    named = zip(operator._schema.arguments, args, strict=False)  # noqa: SLF001
    given = kwargs | {argument.name: value for argument, value in named}
    changed = [each.name for each in operator._schema.arguments if each.is_write]  # noqa: SLF001
    return tree_leaves([given.get(name) for name in changed])


def _defer(
    operator: Any,  # noqa: ANN401
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> Any:  # noqa: ANN401
    """Return an operator's deferred result; None if the result is not a tensor."""
    moved = kwargs.get("device")
    options = kwargs if moved is None else kwargs | {"device": torch.device("meta")}
    try:
        shapes = operator(*tree_map(_on_meta, args), **tree_map(_on_meta, options))
    except (NotImplementedError, RuntimeError):  # its result's shape depends on values
        return None
    if tree_any(lambda like: not isinstance(like, Tensor), shapes):
        return None
    source = args[0]
    same = operator in UNCHANGED or operator in CASTS
    stored = exact = rows = None
    if same and isinstance(source, DeferredTensor):
        stored, exact, rows = source.stored, source.exact, source.rows
        if rows is not None and exact is None:  # quantized values are not rounded in between
            rows = partial(_cast, rows, shapes.dtype)
    where = device if moved is None else torch.device(moved)

    def run() -> Any:  # noqa: ANN401
        return operator(*tree_map(present, args), **tree_map(present, kwargs))

    if isinstance(shapes, Tensor):
        return DeferredTensor(
            *(shapes, run),
            stored=stored,
            device=where,
            exact=exact,
            rows=rows,
            source=(operator, args, kwargs),
        )
    return type(shapes)(
        DeferredTensor(like, partial(_part, run, number), device=where)
        for number, like in enumerate(shapes)
    )


def _cast(rows: Callable[[int, int], Tensor], dtype: torch.dtype, start: int, end: int) -> Tensor:
    return rows(start, end).to(dtype)


def _has_parts(weight: Tensor) -> bool:
    """Return whether a weight can be computed in parts; in 16 bits, sums would differ."""
    deferred = isinstance(weight, DeferredTensor) and weight.rows is not None
    return deferred and weight.dtype == torch.float32


def _multiply(x: Tensor, weight: DeferredTensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer, computing its weight in parts."""
    assert weight.rows is not None
    outputs, inputs = weight.shape
    out = x.new_empty(*x.shape[:-1], outputs)
    step = max(1, PART // inputs)
    for start in range(0, outputs, step):
        end = min(start + step, outputs)
        part = weight.rows(start, end).float()
        out[..., start:end] = functional.linear(x, part)
    return out if bias is None else out + present(bias)


def _look_up(weight: DeferredTensor, indices: Tensor) -> Tensor:
    """Return some rows of embeddings, with only these numbers made."""
    assert weight.rows is not None
    wanted, places = torch.unique(indices, return_inverse=True)
    rows = [weight.rows(row, row + 1) for row in wanted.tolist()]
    return torch.cat(rows).to(weight.dtype)[places]


def _part(run: Callable[[], Any], number: int) -> Tensor:
    part: Tensor = run()[number]
    return part


def present(value: Any) -> Any:  # noqa: ANN401 - operators' arguments
    """Return a deferred tensor's values; other objects unchanged."""
    return value.make() if isinstance(value, DeferredTensor) else value


def take(weight: Tensor, shard: Shard) -> Tensor:
    """Return a shard of a weight: a copy, or a deferred tensor if the weight is deferred."""
    if not isinstance(weight, DeferredTensor):
        return shard.take(weight).clone()
    if (part := _shard_before_joining(weight, shard)) is not None:
        return part
    like = shard.take(torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
    stored, exact = weight.stored, weight.exact
    return DeferredTensor(
        like,
        partial(_taken, weight.make, shard),
        stored=None if stored is None else partial(_stored_part, stored, shard),
        device=weight.device,
        exact=None if exact is None else partial(_taken, exact, shard),
        rows=None if weight.rows is None else _rows_of_part(weight.rows, shard, weight.dim()),
    )


def _shard_before_joining(weight: DeferredTensor, shard: Shard) -> Tensor | None:
    """Shard the arguments of an operator instead of its result; None if that is not possible.

    A rank then reads only its own experts, and stacks and concatenates only its shards of them.
    """
    if weight.source is None:
        return None
    operator, args, kwargs = weight.source
    tensors: Tensor | Sequence[Tensor] | None = None
    if operator in UNCHANGED or operator in CASTS:
        tensors = take(args[0], shard)
    elif operator in {STACK, CONCATENATE}:
        dim = (args[1] if len(args) > 1 else 0) % weight.dim() - weight.dim()
        tensors = _shard_joined(args[0], dim, shard, stacked=operator is STACK)
    return None if tensors is None else operator(tensors, *args[1:], **kwargs)


def _shard_joined(
    tensors: Sequence[Tensor], dim: int, shard: Shard, *, stacked: bool
) -> Sequence[Tensor] | None:
    """Shard tensors before they are stacked or concatenated; None if that is not possible.

    Args:
        tensors: The tensors.
        dim: The dimension along which they are joined, counted from the last.
        shard: The shard of the result.
        stacked: Whether they are stacked, not concatenated.
    """
    if shard.dim > dim or (shard.dim < dim and not stacked):
        return [take(each, shard) for each in tensors]
    if shard.dim == dim and stacked and shard.groups == 1:
        return tensors[shard.start : shard.start + shard.length]
    is_each = not stacked and shard.groups == len(tensors)
    if shard.dim == dim and is_each and len({each.shape[dim] for each in tensors}) == 1:
        return [take(each, replace(shard, groups=1)) for each in tensors]
    return None


def _taken(make: Callable[[], Tensor], shard: Shard) -> Tensor:
    return shard.take(make()).clone()  # a view would keep the whole in memory


def _stored_part(read: "Callable[[], StoredWeight]", shard: Shard) -> "StoredWeight":
    return read().shard(shard)


def _rows_of_part(
    rows: Callable[[int, int], Tensor], shard: Shard, dims: int
) -> Callable[[int, int], Tensor] | None:
    """Return the function that computes rows of a shard; None if its rows are not one range."""
    if shard.dim == -1:
        return lambda start, end: shard.take(rows(start, end))
    if shard.groups == 1 and shard.dim == -dims:
        return lambda start, end: rows(shard.start + start, shard.start + end)
    return None


def in_float32(weight: Tensor) -> DeferredTensor:
    """Return a deferred float32 weight; on a CPU, a quantized weight's exact values."""
    exact = rows = None
    if isinstance(weight, DeferredTensor) and weight.device.type == "cpu":
        exact, rows = weight.exact, weight.rows
    make = exact or partial(_widen, weight.detach())
    like = torch.empty(weight.shape, device="meta")
    return DeferredTensor(like, make, device=weight.device, rows=rows)


def _widen(weight: Tensor) -> Tensor:
    numbers: Tensor = present(weight)
    return numbers.float()


def _on_meta(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, DeferredTensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value


def own_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the dictionary, the name and the tensor of each of a module's own weights."""
    for kept in (module._parameters, module._buffers):  # noqa: SLF001 - to replace them
        yield from (
            (kept, name, tensor) for name, tensor in list(kept.items()) if tensor is not None
        )


@contextmanager
def held(module: nn.Module) -> Iterator[None]:
    """Materialize a module's deferred weights within the context, for repeated use.

    Args:
        module: The module; weights replaced or removed within the context stay so.
    """
    kept = _hold(module)
    try:
        yield
    finally:
        for weights, name, tensor, numbers in kept:
            if weights.get(name) is numbers:
                weights[name] = tensor


def hold(model: nn.Module) -> None:
    """Materialize all of a model's deferred weights for good.

    Args:
        model: The model; changed in place.
    """
    _hold(model)


def _hold(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor, Tensor]]:
    """Replace deferred weights; return each one's dictionary, name, original and replacement."""
    made: dict[Tensor, Tensor] = {}  # tied weights stay tied
    kept: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
    for weights, name, tensor in list(chain.from_iterable(map(own_tensors, module.modules()))):
        if not isinstance(tensor, DeferredTensor):
            continue
        if tensor not in made:
            numbers = tensor.make()
            is_parameter = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(numbers, requires_grad=False) if is_parameter else numbers
        weights[name] = made[tensor]
        kept.append((weights, name, tensor, made[tensor]))
    return kept
