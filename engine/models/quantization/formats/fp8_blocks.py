"""FP8 with a scale per block of a weight, as in DeepSeek's and Qwen's checkpoints.

`weight` `[outputs, inputs]` is in e4m3, and `weight_scale_inv` `[outputs / rows, inputs /
columns]`, rounded up, has the blocks' factors. Without blocks there is one scale.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from octavo.engine.models.quantization.formats.base import (
    SCALES,
    Format,
    ScaledFp8,
    Settings,
    TensorHeader,
    group_bits,
    is_left,
    is_names,
    known,
    need,
    need_finite,
    need_header,
    need_parts,
    one_of,
)

E4M3 = "F8_E4M3"
USUAL = [128, 128]
"""The size of blocks if the config has none."""


class Fp8(Format):
    """Weights in e4m3, with a scale per block or one scale."""

    endings: ClassVar = {".weight": "weight", ".weight_scale_inv": "weight_scale_inv"}

    def __init__(self, settings: Settings) -> None:
        known(settings, ALLOWED)
        blocks = settings.get("weight_block_size", USUAL)
        self._blocks: tuple[int, int] | None = None if blocks is None else tuple(blocks)
        names = (settings.get(key) or [] for key in ("modules_to_not_convert", "ignored_layers"))
        self._left: list[str] = [name for some in names for name in some]

    @property
    def description(self) -> str:
        """A description of the format and its settings."""
        blocks = "one scale" if self._blocks is None else "blocks of {} x {}".format(*self._blocks)
        return f"FP8, {blocks}"

    def kernel_bits(self, layer: str, inputs: int) -> int | None:  # noqa: ARG002
        """Return None: no kernel reads this format."""
        return None

    def gpu_bits(self, layer: str, inputs: int) -> float | None:  # noqa: ARG002
        """Return the bits per weight that a GPU's kernels store."""
        return group_bits(8, inputs, -1 if self._blocks is None else self._blocks[1])

    def covers(self, layer: str) -> bool:
        """Return whether a layer is quantized: all are, except the head and the layers named."""
        return not is_left(layer, self._left)

    def is_quantized(self, parts: Mapping[str, TensorHeader]) -> bool:
        """Return whether a weight is in FP8 or has a scale."""
        return "weight_scale_inv" in parts or parts["weight"].dtype.startswith("F8")

    def check(self, layer: str, parts: Mapping[str, TensorHeader]) -> tuple[int, ...]:
        """Check the tensors of a weight; return `(outputs, inputs)`."""
        need_parts(layer, parts, ("weight", "weight_scale_inv"))
        weight, scale = parts["weight"], parts["weight_scale_inv"]
        need(len(weight.shape) == 2, layer, f"has the shape {list(weight.shape)}")
        need_header(layer, "weight", weight, [E4M3], weight.shape)
        if self._blocks is None:
            need(math.prod(scale.shape) == 1, layer, f"has {math.prod(scale.shape)} scales, not 1")
            need_header(layer, "weight_scale_inv", scale, SCALES, scale.shape)
        else:
            shape = tuple(map(_blocks, weight.shape, self._blocks))
            need_header(layer, "weight_scale_inv", scale, SCALES, shape)
        return weight.shape

    def read(self, layer: str, parts: Mapping[str, Tensor]) -> ScaledFp8:
        """Return a weight."""
        weight, scale = parts["weight"], parts["weight_scale_inv"]
        need_finite(layer, "weight_scale_inv", scale)
        need_finite(layer, "weight", weight)
        return ScaledFp8(weight, scale.float(), self._blocks)


def is_block(value: object) -> bool:
    """Return whether a value is the size of a block, or None."""
    return value is None or (
        isinstance(value, list)
        and len(value) == 2
        and all(type(size) is int and size > 0 for size in value)
    )


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


ALLOWED = {
    "quant_method": one_of("fp8"),
    "fmt": one_of("e4m3"),
    "activation_scheme": one_of("dynamic"),
    "weight_block_size": is_block,
    "modules_to_not_convert": is_names,
    "ignored_layers": is_names,
    "expert_dtype": one_of("fp8"),
    "scale_fmt": one_of("ue8m0", "float", None),
    "dequantize": one_of(True, False),
}
"""Checks of known settings."""
FORMAT = Fp8
