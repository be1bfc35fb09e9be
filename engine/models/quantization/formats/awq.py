"""AWQ (Lin et al. 2023), in the layout "gemm" of AutoAWQ.

A word of `qweight` `[inputs, outputs / 8]` int32 holds eight outputs of an input, in the order of
`ORDER`; `qzeros` `[groups, outputs / 8]` holds groups' zeros likewise, and `scales` is `[groups,
outputs]`. A weight is `(code - zero) * scale`.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from octavo.engine.models.quantization.formats.base import (
    SCALES,
    Format,
    Integers,
    Settings,
    TensorHeader,
    anything,
    group_bits,
    group_of_inputs,
    groups_of,
    is_group_size,
    is_left,
    is_names,
    known,
    need,
    need_finite,
    need_header,
    need_parts,
    nibble_bits,
    one_of,
    unpack,
    unsupported,
)

BITS = 4
PER_WORD = 32 // BITS
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each code of a word, from the low bits up."""


class Awq(Format):
    """AWQ with 4 bits and zero points."""

    endings: ClassVar = {".qweight": "qweight", ".qzeros": "qzeros", ".scales": "scales"}

    def __init__(self, settings: Settings) -> None:
        known(settings, ALLOWED)
        sizes = [settings[name] for name in ("group_size", "q_group_size") if name in settings]
        if not sizes or any(size != sizes[0] for size in sizes):
            raise unsupported("group_size", sizes or None)
        if not any(name in settings for name in ("bits", "w_bit")):
            raise unsupported("bits", None)
        self._size: int = sizes[0]
        self._left: list[str] = settings.get("modules_to_not_convert") or []

    @property
    def description(self) -> str:
        """A description of the format and its settings."""
        return f"AWQ, {BITS} bits, groups of {self._size}"

    def kernel_bits(self, layer: str, inputs: int) -> int | None:  # noqa: ARG002
        """Return the bits per weight that kernels store."""
        return nibble_bits(inputs, self._size)

    def gpu_bits(self, layer: str, inputs: int) -> float | None:  # noqa: ARG002
        """Return the bits per weight that a GPU's kernels store."""
        return group_bits(BITS, inputs, self._size)

    def covers(self, layer: str) -> bool:
        """Return whether a layer is quantized: all are, except the head and the layers named."""
        return not is_left(layer, self._left)

    def check(self, layer: str, parts: Mapping[str, TensorHeader]) -> tuple[int, ...]:
        """Check the tensors of a weight; return `(outputs, inputs)`."""
        need_parts(layer, parts, ("qweight", "qzeros", "scales"))
        weight = parts["qweight"]
        need(len(weight.shape) == 2, layer, f"has qweight of shape {list(weight.shape)}")
        inputs, words = weight.shape
        groups = groups_of(layer, inputs, self._size)
        need_header(layer, "qweight", weight, ["I32"], weight.shape)
        need_header(layer, "qzeros", parts["qzeros"], ["I32"], (groups, words))
        need_header(layer, "scales", parts["scales"], SCALES, (groups, words * PER_WORD))
        return words * PER_WORD, inputs

    def read(self, layer: str, parts: Mapping[str, Tensor]) -> Integers:
        """Return a weight."""
        need_finite(layer, "scales", parts["scales"])
        codes, zero = (_in_order(parts[name]).t() for name in ("qweight", "qzeros"))
        groups, inputs = len(parts["scales"]), codes.shape[1]
        group_of = group_of_inputs(layer, "g_idx", None, inputs, groups)
        return Integers(codes, parts["scales"].float().t(), zero.float(), BITS, group_of)


def _in_order(words: Tensor) -> Tensor:
    """Unpack words along the second dimension, in the order of the outputs."""
    numbers = unpack(words, BITS, 1).reshape(len(words), -1, PER_WORD)
    return numbers[..., torch.tensor(ORDER).argsort()].flatten(1)


ALLOWED = {
    "quant_method": one_of("awq"),
    "bits": one_of(BITS),
    "w_bit": one_of(BITS),
    "group_size": is_group_size,
    "q_group_size": is_group_size,
    "zero_point": one_of(True),
    "version": lambda value: str(value).lower() == "gemm",
    "format": one_of("gemm"),
    "checkpoint_format": one_of("gemm"),
    "backend": one_of("autoawq"),
    "modules_to_not_convert": is_names,
    "desc_act": one_of(False),
    "sym": one_of(False),
    "lm_head": one_of(False),
    "pack_dtype": one_of("int32"),
    "dynamic": lambda value: not value,
    "meta": anything,
    "do_fuse": anything,
    "fuse_max_seq_len": anything,
    "exllama_config": anything,
    "modules_to_fuse": anything,
}
"""Checks of known settings; settings with `anything` do not affect weights."""
FORMAT = Awq
