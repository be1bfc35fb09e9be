"""GGUF's own blocks; `octavo.common.models.gguf.tensor_locations` has their locations.

A layer's `blocks` `[outputs, bytes]` uint8 are whole units of a GGUF type, which the config names
per layer. Its `order` `[outputs]` int32, if any, is the row of each output. ggml's ggml-common.h
defines the types.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from octavo.common.models.gguf.tensor_locations import BLOCKS, ORDER
from octavo.engine.models.quantization.formats.base import (
    Floats,
    Format,
    Settings,
    TensorHeader,
    known,
    need,
    need_header,
    need_parts,
    one_of,
    unsupported,
)
from octavo.engine.models.shard import Shard
from octavo.kernels.cpu import dequantize_blocks
from octavo.kernels.cpu.blocks import (
    BLOCK,
    FORMATS,
    BlockFields,
    BlockFormat,
    read_fields,
)

SCALE_OF_Q6_K = 208
"""Offset of a unit's scale, in bytes."""
EXPONENT = 0x7C
"""The bits of the exponent in a float16's second byte."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight in blocks.

    Attributes:
        stored: `[outputs, bytes]` uint8, as in the file.
        format: Format of the blocks.
        order: `[outputs]` int64, the row of each output; None if they are in order.
    """

    stored: Tensor
    format: BlockFormat
    order: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """The outputs' bytes in their order, `[outputs, bytes]` uint8."""
        return self.stored if self.order is None else self.stored[self.order]

    def part(self, start: int, end: int) -> "Blocks":
        """Return outputs `start` to `end - 1`."""
        if self.order is None:
            return replace(self, stored=self.stored[start:end])
        return replace(self, order=self.order[start:end])

    def shard(self, shard: Shard) -> "Blocks | Floats":
        """Return a shard; it is dequantized if it splits a unit of inputs."""
        if shard.dim == -2:
            rows = torch.arange(len(self.stored)) if self.order is None else self.order
            return replace(self, order=shard.take(rows[:, None])[:, 0])
        unit, size = self.format.unit, self.format.unit_bytes
        if shard.groups > 1 or shard.start % unit or shard.length % unit:
            return Floats(shard.take(self.dequantize()))
        start, length = (count // unit * size for count in (shard.start, shard.length))
        stored = replace(shard, start=start, length=length).take(self.stored)
        return replace(self, stored=stored.contiguous())

    def dequantize(self) -> Tensor:
        """Return the weight in float32, `[outputs, inputs]`."""
        return dequantize_blocks(self.stored, self.format, order=self.order)

    def fields(self) -> BlockFields:
        """Return the fields in the bytes."""
        return read_fields(self.rows, self.format)


class Gguf(Format):
    """Weights in GGUF's blocks."""

    endings: ClassVar = {BLOCKS: "blocks", ORDER: "order"}
    packs_ends: ClassVar = True
    has_rows: ClassVar = True

    def __init__(self, settings: Settings) -> None:
        known(settings, ALLOWED)
        kinds: Mapping[str, str] = settings.get("weights") or {}
        for kind in kinds.values():
            if kind not in FORMATS:
                raise unsupported("weights of type", kind)
        self._kinds = {layer: FORMATS[kind] for layer, kind in kinds.items()}
        self._finite: set[str] = set()  # layers whose scales were checked

    @property
    def description(self) -> str:
        """A description of the format and its settings."""
        return f"GGUF, {', '.join(sorted({kind.name for kind in self._kinds.values()}))}"

    def kernel_bits(self, layer: str, inputs: int) -> int | None:  # noqa: ARG002
        """Return the bits per weight that kernels store, rounded up."""
        block_format = self._kinds.get(layer)
        return (
            None if block_format is None else -(-block_format.unit_bytes * 8 // block_format.unit)
        )

    def gpu_bits(self, layer: str, inputs: int) -> float | None:  # noqa: ARG002
        """Return the bits per weight that a GPU's kernels store."""
        block_format = self._kinds.get(layer)
        if block_format is None:
            return None
        return (4 if block_format.bits == 4 else 8) + (1 if block_format.group == BLOCK else 2)

    def covers(self, layer: str) -> bool:
        """Return whether a layer is quantized."""
        return layer in self._kinds

    def check(self, layer: str, parts: Mapping[str, TensorHeader]) -> tuple[int, ...]:
        """Check the tensor of a layer's weight, and return its shape, `(outputs, inputs)`."""
        need_parts(layer, parts, ("blocks",))
        need(layer in self._kinds, layer, "has a type that the config does not say")
        block_format, header = self._kinds[layer], parts["blocks"]
        need(len(header.shape) == 2, layer, f"has blocks of shape {list(header.shape)}")
        need_header(layer, "blocks", header, ["U8"], header.shape)
        outputs, size = header.shape
        whole = size > 0 and size % block_format.unit_bytes == 0
        if "order" in parts:
            need_header(layer, "order", parts["order"], ["I32"], (outputs,))
        need(whole, layer, f"has {size} bytes an output, which {block_format.name} does not divide")
        return outputs, size // block_format.unit_bytes * block_format.unit

    def read(self, layer: str, parts: Mapping[str, Tensor]) -> Blocks:
        """Return a weight."""
        block_format, rows = self._kinds[layer], parts["blocks"]
        if layer not in self._finite:
            scale = SCALE_OF_Q6_K if block_format.bits == 6 else 0
            need(
                _are_finite(rows, scale, block_format),
                layer,
                "has non-finite values in scales",
            )
            if block_format.has_min:
                need(
                    _are_finite(rows, 2, block_format),
                    layer,
                    "has non-finite values in minima",
                )
            self._finite.add(layer)
        return Blocks(rows, block_format, parts["order"].long() if "order" in parts else None)


def _are_finite(rows: Tensor, first: int, block_format: BlockFormat) -> bool:
    """Return whether the float16 at byte `first` of each unit is finite.

    It is not finite if all exponent bits, which are in its second byte, are set.
    """
    high = rows.reshape(len(rows), -1, block_format.unit_bytes)[..., first + 1]
    return not bool(((high & EXPONENT) == EXPONENT).any())


def _are_kinds(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(part, str) for pair in value.items() for part in pair
    )


ALLOWED = {"quant_method": one_of("gguf"), "weights": _are_kinds}
FORMAT = Gguf
