"""The interface of a format of quantized checkpoints."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.engine.models.shard import Shard
from octavo.kernels.cpu.linear import GROUP
from octavo.kernels.quantized import E2M1, E8M0_BIAS, takes_group

Settings = Mapping[str, Any]
SCALES = ("F16", "BF16", "F32")
"""Allowed dtypes of scales, by safetensors' names."""
ZERO_OF_BYTES = 128
"""The zero point of 8-bit weights that kernels store as int8."""
NIBBLE_BITS = 5
"""Bits per 4-bit weight, with its share of a group's scale and zero point."""


class WeightError(ModelError):
    """A quantized weight cannot be read; the message has the reason."""


class TensorHeader(NamedTuple):
    """The entry of a tensor in a safetensors file's header.

    Attributes:
        dtype: Its type, by safetensors' name.
        shape: Its shape.
    """

    dtype: str
    shape: tuple[int, ...]


class StoredWeight(Protocol):
    """A stored weight, unpacked."""

    def dequantize(self) -> Tensor:
        """Return the weight in float32."""

    def shard(self, shard: Shard) -> "StoredWeight":
        """Return a shard; its float32 values are the same shard of this weight's values."""


@runtime_checkable
class Rows(StoredWeight, Protocol):
    """A weight whose rows can be unpacked separately."""

    def part(self, start: int, end: int) -> StoredWeight:
        """Return rows `start` to `end - 1`."""


@dataclass(frozen=True, slots=True)
class Integers:
    """A linear layer's weight in integers: `(codes - zero) * scale`.

    Attributes:
        codes: `[outputs, inputs]` uint8, from 0 to `2 ** bits - 1`.
        scale: `[outputs, groups]` float32.
        zero: `[outputs, groups]` float32, integers.
        bits: Bits of a code.
        group_of: `[inputs]` int64, the group of each input.
        rounds_inputs: Whether the checkpoint is made for 8-bit inputs.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    group_of: Tensor
    rounds_inputs: bool = False

    @property
    def group_size(self) -> int | None:
        """Inputs of each group; None if groups differ in size, as in some shards."""
        sizes = set(self.group_of.bincount(minlength=self.scale.shape[1]).tolist())
        return sizes.pop() if len(sizes) == 1 else None

    def shard(self, shard: Shard) -> "Integers":
        """Return a shard; if it splits groups that are in order, all groups become smaller."""
        if shard.dim == -2:
            codes, scale, zero = map(shard.take, (self.codes, self.scale, self.zero))
            return replace(self, codes=codes, scale=scale, zero=zero)
        group_of = shard.take(self.group_of)
        kept, numbers = torch.unique(group_of, return_inverse=True)
        runs, sizes = torch.unique_consecutive(group_of, return_counts=True)
        if len(runs) == len(kept):
            size = math.gcd(*sizes.tolist())
            kept, numbers = group_of[::size], torch.arange(len(group_of)) // size
        return replace(
            self,
            codes=shard.take(self.codes),
            scale=self.scale[:, kept],
            zero=self.zero[:, kept],
            group_of=numbers,
        )

    def order(self) -> Tensor | None:
        """Return the inputs sorted by group, `[inputs]` int64; None if they are in order."""
        order = self.group_of.argsort(stable=True)
        return None if bool((order[1:] > order[:-1]).all()) else order

    def dequantize(self) -> Tensor:
        """Return the weight in float32, `[outputs, inputs]`."""
        zero, scale = self.zero[:, self.group_of], self.scale[:, self.group_of]
        return (self.codes.float() - zero) * scale


@dataclass(frozen=True, slots=True)
class ScaledFp8:
    """A linear layer's weight in e4m3, with a scale for each block.

    Attributes:
        codes: `[outputs, inputs]` e4m3.
        scale: `[blocks of outputs, blocks of inputs]` float32.
        block: Outputs and inputs of a block; None if there is one scale.
    """

    codes: Tensor
    scale: Tensor
    block: tuple[int, int] | None

    def dequantize(self) -> Tensor:
        """Return the weight in float32, `[outputs, inputs]`."""
        return times_blocks(self.codes.float(), self.scale, self.block)

    def shard(self, shard: Shard) -> "ScaledFp8 | Floats":
        """Return a shard; it is dequantized if it splits a block of inputs."""
        codes = shard.take(self.codes)
        if self.block is None:
            return replace(self, codes=codes)
        height, width = self.block
        if shard.dim == -2:
            return ScaledFp8(codes, shard.take(self.scale_of_outputs()), (1, width))
        if self.scale.shape[1] == 1:
            return ScaledFp8(codes, self.scale, (height, codes.shape[1]))
        if shard.groups > 1 or shard.start % width:
            return Floats(shard.take(self.dequantize()))
        first = shard.start // width
        scale = self.scale[:, first : first + -(-shard.length // width)]
        return ScaledFp8(codes, scale, (height, min(width, shard.length)))

    def scale_of_outputs(self) -> Tensor:
        """Return the scales of each output, `[outputs, blocks of inputs]` float32."""
        outputs = len(self.codes)
        if self.block is None:
            return self.scale.reshape(1, 1).expand(outputs, 1)
        return self.scale.repeat_interleave(self.block[0], 0)[:outputs]


@dataclass(frozen=True, slots=True)
class ScaledE2m1:
    """All experts' weights of a product in e2m1, with a power of two for each group.

    Attributes:
        codes: `[experts, outputs, inputs]` uint8, from 0 to 15.
        exponents: `[experts, outputs, groups]` uint8, a group's exponent plus 127: e8m0.
    """

    codes: Tensor
    exponents: Tensor

    def shard(self, shard: Shard) -> "ScaledE2m1 | Floats":
        """Return a shard; it is dequantized if it splits a group of inputs."""
        size = self.codes.shape[-1] // self.exponents.shape[-1]
        if shard.dim != -2:  # its outputs are last in float32
            shard = replace(shard, dim=-2 if shard.dim == -1 else shard.dim)
            return ScaledE2m1(shard.take(self.codes), shard.take(self.exponents))
        if shard.groups > 1 or shard.start % size or shard.length % size:
            return Floats(shard.take(self.dequantize()))
        groups = replace(shard, dim=-1, start=shard.start // size, length=shard.length // size)
        return ScaledE2m1(replace(shard, dim=-1).take(self.codes), groups.take(self.exponents))

    def expert(self, number: int) -> "ScaledE2m1":
        """Return one expert's weights."""
        only = slice(number, number + 1)
        return ScaledE2m1(self.codes[only], self.exponents[only])

    def dequantize(self) -> Tensor:
        """Return the weights in float32, `[experts, inputs, outputs]`, as in gpt-oss."""
        experts, outputs, inputs = self.codes.shape
        values = torch.empty(experts, inputs, outputs)
        for out, codes, exponents in zip(values, self.codes, self.exponents, strict=True):
            numbers = torch.tensor(E2M1)[codes.int()].reshape(*exponents.shape, -1)
            powers = exponents.int()[..., None] - E8M0_BIAS
            out.copy_(torch.ldexp(numbers, powers).flatten(-2).t())
        return values


@dataclass(frozen=True, slots=True)
class Floats:
    """A weight whose codes are already multiplied by their scales.

    Attributes:
        values: Values of any shape, float32.
    """

    values: Tensor

    def shard(self, shard: Shard) -> "Floats":
        """Return a shard."""
        return Floats(shard.take(self.values))

    def dequantize(self) -> Tensor:
        """Return the weight in float32."""
        return self.values


class Format(ABC):
    """A format: the tensors of a weight, and their meaning.

    Args:
        settings: The config's settings; the constructor checks all of them.

    Raises:
        UnsupportedModelError: The message names a setting and its value.
    """

    endings: ClassVar[Mapping[str, str]]
    """Parts of a weight by tensor name suffix; the rest of the name is the layer's."""
    weight_ending: ClassVar[str] = ".weight"
    """Suffix of a weight's name in transformers, after the layer's name."""

    packs_ends: ClassVar[bool] = False
    """Whether kernels also take embeddings and the head as stored."""

    has_rows: ClassVar[bool] = False
    """Whether weights are `Rows`."""

    @abstractmethod
    def __init__(self, settings: Settings) -> None: ...

    @property
    @abstractmethod
    def description(self) -> str:
        """A description of the format and its settings."""

    @abstractmethod
    def kernel_bits(self, layer: str, inputs: int) -> int | None:
        """Return the bits per weight that kernels store; None if a layer is dequantized.

        Args:
            layer: The layer's name.
            inputs: The number of its inputs.
        """

    def permutes_inputs(self, layer: str) -> bool:  # noqa: ARG002
        """Return whether a layer's inputs are not in the order of groups."""
        return False

    def gpu_bits(self, layer: str, inputs: int) -> float | None:  # noqa: ARG002
        """Return a GPU's stored bits per weight, with scales; see `kernel_bits`."""
        return None

    @abstractmethod
    def check(self, layer: str, parts: Mapping[str, TensorHeader]) -> tuple[int, ...]:
        """Check the tensors of a weight; return the weight's shape.

        Args:
            layer: The layer's name.
            parts: Its tensors by part; empty without the part that `is_quantized` looks for.

        Raises:
            WeightError: One is missing, or has a wrong type or shape.
        """

    @abstractmethod
    def read(self, layer: str, parts: Mapping[str, Tensor]) -> StoredWeight:
        """Return a weight.

        Args:
            layer: The layer's name.
            parts: Its tensors, which `check` has accepted.

        Raises:
            WeightError: Its values cannot be right.
        """

    @abstractmethod
    def covers(self, layer: str) -> bool:
        """Return whether the config says that a linear layer is quantized."""

    def is_quantized(self, parts: Mapping[str, TensorHeader]) -> bool:
        """Return whether tensors with a weight's name suffixes are quantized."""
        return bool(parts)


def known(settings: Settings, allowed: Mapping[str, Callable[[Any], bool]]) -> None:
    """Refuse settings with an unknown name or value.

    Args:
        settings: The settings.
        allowed: Functions that return whether a value is known, by setting name.

    Raises:
        UnsupportedModelError: The message names the setting and its value.
    """
    for name, value in settings.items():
        if name not in allowed:
            raise UnsupportedModelError(
                f"it has the setting {name} ({value!r}), which Octavo does not know"
            )
        if not allowed[name](value):
            raise unsupported(name, value)


def unsupported(name: str, value: object) -> UnsupportedModelError:
    """Return the error for a setting's value."""
    return UnsupportedModelError(f"it has {name} {value!r}, which Octavo does not read")


def anything(_: object) -> bool:
    """Accept any value, for settings that do not affect weights."""
    return True


def one_of(*values: object) -> Callable[[Any], bool]:
    """Return a function that accepts exactly these values, not equal ones such as True for 1."""
    return lambda value: any(type(value) is type(one) and value == one for one in values)


def is_names(value: object) -> bool:
    """Return whether a value is a list of names, or None."""
    return value is None or (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    )


def is_group_size(value: object) -> bool:
    """Return whether a value is a valid group size; -1 means all inputs."""
    return type(value) is int and (value == -1 or value > 0)


def need(condition: object, layer: str, problem: str) -> None:
    """Raise a WeightError unless a condition holds."""
    if not condition:
        raise WeightError(f"the quantized weight {layer} {problem}: download the model again")


def need_parts(layer: str, parts: Iterable[str], names: Iterable[str]) -> None:
    """Raise a WeightError if parts are missing."""
    for name in names:
        need(name in parts, layer, f"has no {name}")


def need_header(
    layer: str, part: str, header: TensorHeader, dtypes: Sequence[str], shape: tuple[int, ...]
) -> None:
    """Raise a WeightError if a tensor has a wrong type or shape."""
    need(
        header.dtype in dtypes,
        layer,
        f"has {part} of type {header.dtype} instead of {' or '.join(dtypes)}",
    )
    need(
        header.shape == shape,
        layer,
        f"has {part} of shape {list(header.shape)} instead of {list(shape)}",
    )


def need_finite(layer: str, part: str, values: Tensor) -> None:
    """Raise a WeightError if a tensor has infinite values or NaN."""
    need(values.float().isfinite().all(), layer, f"has non-finite values in {part}")


def groups_of(layer: str, inputs: int, size: int) -> int:
    """Return the number of groups of `size` inputs, or of all inputs if it is -1."""
    if size == -1:
        return 1
    need(inputs % size == 0, layer, f"has {inputs} inputs, which groups of {size} do not divide")
    return inputs // size


def group_of_inputs(
    layer: str, part: str, stored: Tensor | None, inputs: int, groups: int
) -> Tensor:
    """Return the group of each input, `[inputs]` int64.

    Args:
        layer: The layer's name.
        part: The name of the part.
        stored: The stored part, `[inputs]` int32; None: the groups are in order.
        inputs: The number of inputs.
        groups: The number of groups, all of one size.

    Raises:
        WeightError: The groups are not of that size.
    """
    size = inputs // groups
    if stored is None:
        return torch.arange(inputs) // size
    group_ids = stored.long()
    inside = int(group_ids.min()) >= 0 and int(group_ids.max()) < groups
    need(inside, layer, f"has a {part} of groups outside of 0 to {groups - 1}")
    whole = bool((group_ids.bincount(minlength=groups) == size).all())
    need(whole, layer, f"has a {part} with groups of other sizes than {size}")
    return group_ids


def is_left(layer: str, names: Iterable[str]) -> bool:
    """Return whether a layer is not quantized: the head, or its name contains one of `names`."""
    return layer.endswith("lm_head") or any(name in layer for name in names)


def times_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Multiply each block of a weight by its scale.

    Args:
        weight: `[outputs, inputs]`.
        scale: `[blocks of outputs, blocks of inputs]`, or one number.
        block: Rows and columns of a block; None for a single scale.
    """
    if block is None:
        return weight * scale.reshape(())
    outputs, inputs = weight.shape
    rows = scale.repeat_interleave(block[0], 0)[:outputs]
    return weight * rows.repeat_interleave(block[1], 1)[:, :inputs]


def in_groups(inputs: int, size: int) -> bool:
    """Return whether the 4-bit kernels take groups of `size` inputs; -1 means all inputs."""
    return inputs % GROUP == 0 and (size == -1 or size % GROUP == 0)


def nibble_bits(inputs: int, size: int) -> int | None:
    """Return the 4-bit kernels' stored bits per weight; None if they do not support it."""
    return NIBBLE_BITS if in_groups(inputs, size) else None


def group_bits(bits: int, inputs: int, size: int) -> float | None:
    """Return a GPU's stored bits per weight, with scales; see `kernel_bits`.

    Args:
        bits: Bits of a code.
        inputs: The number of inputs.
        size: Inputs that share a scale; -1 for all.
    """
    group = inputs if size == -1 else size
    return (4 if bits <= 4 else 8) + 32 / group if takes_group(group, inputs) else None


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack the codes in words, from the low bits up, along a dimension.

    Args:
        words: `[rows, columns]` int32.
        bits: Bits of a code: 2, 4 or 8.
        dim: 0 if a word has codes of several rows, 1 if of several columns.

    Returns:
        The codes, uint8, with `32 / bits` times as many rows or columns.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    spread = words.unsqueeze(dim + 1) >> shifts.reshape(-1, *[1] * (1 - dim))
    numbers: Tensor = (spread & (2**bits - 1)).to(torch.uint8)
    return numbers.flatten(dim, dim + 1)
