"""MXFP4 (OCP Microscaling Formats 1.0), the format of gpt-oss's experts.

`..._blocks` `[experts, outputs, groups, 16]` uint8 has a group's 32 values in e2m1, two per byte,
the first in the low bits. `..._scales` `[experts, outputs, groups]` uint8 has the group's exponent
plus 127.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from octavo.engine.models.quantization.formats.base import (
    NIBBLE_BITS,
    Format,
    ScaledE2m1,
    Settings,
    TensorHeader,
    is_names,
    known,
    need,
    need_header,
    need_parts,
    one_of,
)

GROUP = 32
NAN = 255


class Mxfp4(Format):
    """Experts in MXFP4."""

    endings: ClassVar = {"_blocks": "blocks", "_scales": "scales"}
    weight_ending = ""

    def __init__(self, settings: Settings) -> None:
        known(settings, ALLOWED)

    @property
    def description(self) -> str:
        """A description of the format and its settings."""
        return f"MXFP4, groups of {GROUP}"

    def kernel_bits(self, layer: str, inputs: int) -> int | None:  # noqa: ARG002
        """Return the bits per weight that kernels store, rounded up."""
        return NIBBLE_BITS

    def gpu_bits(self, layer: str, inputs: int) -> float | None:  # noqa: ARG002
        """Return the bits per weight that a GPU's kernels store."""
        return 4 + 8 / GROUP

    def covers(self, layer: str) -> bool:
        """Return whether a layer is an expert layer: no others are quantized."""
        return ".experts." in layer

    def check(self, layer: str, parts: Mapping[str, TensorHeader]) -> tuple[int, ...]:
        """Check the tensors of a weight; return `(experts, inputs, outputs)`."""
        need_parts(layer, parts, ("blocks", "scales"))
        blocks = parts["blocks"]
        need(len(blocks.shape) == 4, layer, f"has blocks of shape {list(blocks.shape)}")
        experts, outputs, groups, _ = blocks.shape
        shape = (experts, outputs, groups)
        need_header(layer, "blocks", blocks, ["U8"], (*shape, GROUP // 2))
        need_header(layer, "scales", parts["scales"], ["U8"], shape)
        return experts, groups * GROUP, outputs

    def read(self, layer: str, parts: Mapping[str, Tensor]) -> ScaledE2m1:
        """Return a weight; transformers' gpt-oss holds it transposed."""
        blocks, scales = parts["blocks"], parts["scales"]
        need(int(scales.max()) < NAN, layer, "has non-finite values in scales")
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-3)
        return ScaledE2m1(codes, scales)


ALLOWED = {
    "quant_method": one_of("mxfp4"),
    "modules_to_not_convert": is_names,
    "dequantize": one_of(True, False),
}
"""Checks of known settings."""
FORMAT = Mxfp4
