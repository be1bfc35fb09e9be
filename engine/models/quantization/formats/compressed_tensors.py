"""The formats of compressed-tensors, which LLM Compressor writes, with weights in 4 and 8 bits.

- pack-quantized: a word of `weight_packed` `[outputs, inputs * bits / 32]` int32 holds consecutive
  inputs, a word of `weight_zero_point` `[outputs * bits / 32, groups]` consecutive outputs. Both
  hold integers plus `2 ** (bits - 1)`. `weight_shape` is `[outputs, inputs]`.
- int-quantized, float-quantized and naive-quantized: `weight` is in int8 or e4m3, like
  `weight_zero_point` `[outputs, groups]`, if any.

`weight_scale` is `[outputs, groups]`, `[outputs, 1]`, `[1]` or of blocks. A weight is `(number -
zero) * scale`. `weight_g_idx` `[inputs]` is the group of each input, if activation order permuted
them. Scales of activations are not used: activations stay in 16 bits, or are rounded to 8 bits at
run time.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.common.models.errors import UnsupportedModelError
from octavo.engine.models.quantization.formats.base import (
    SCALES,
    Floats,
    Format,
    Integers,
    ScaledFp8,
    Settings,
    StoredWeight,
    TensorHeader,
    anything,
    group_bits,
    group_of_inputs,
    groups_of,
    is_group_size,
    is_names,
    known,
    need,
    need_finite,
    need_header,
    need_parts,
    nibble_bits,
    one_of,
    times_blocks,
    unpack,
    unsupported,
)
from octavo.engine.models.quantization.formats.fp8_blocks import E4M3, is_block

PACKED = "pack-quantized"
WHOLE = ("int-quantized", "float-quantized", "naive-quantized")
CLASS = "Linear"
"""The target name for all linear layers."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """The quantization of the weights of some layers.

    Attributes:
        packed: Whether weights are words.
        bits: Bits of a code.
        is_float: Whether codes are floats.
        symmetric: Whether there are no zero points.
        strategy: The weights that share a scale: "tensor", "channel", "group" or "block".
        group_size: Inputs of a group; -1 for all.
        block: Rows and columns of a block, or None.
        permuted: Whether activation order permuted the groups.
        rounds_inputs: Whether the checkpoint is made for 8-bit inputs.
    """

    packed: bool
    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int] | None
    permuted: bool
    rounds_inputs: bool

    @property
    def offset(self) -> int:
        """Offset that makes signed codes positive."""
        return 1 << (self.bits - 1)

    def scale_shapes(self, outputs: int, inputs: int, layer: str) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that scales may have."""
        if self.strategy == "tensor":
            return (1,), (), (1, 1)
        if self.strategy == "block":
            assert self.block is not None
            sizes = zip((outputs, inputs), self.block, strict=True)
            return (tuple(-(-size // block) for size, block in sizes),)
        if self.strategy == "channel":
            return (outputs, 1), (outputs,)
        return ((outputs, groups_of(layer, inputs, self.group_size)),)


class CompressedTensors(Format):
    """Weights in 4 or 8 bits, packed or not, and in FP8."""

    endings: ClassVar = {
        f".{part}": part
        for part in (
            *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"),
            *("weight_g_idx", "input_scale", "input_zero_point"),
        )
    }

    def __init__(self, settings: Settings) -> None:
        known(settings, ALLOWED)
        groups = settings.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise unsupported("config_groups", groups)
        whole = settings.get("format")
        self._schemes = [
            (_targets(name, group), _scheme(name, group, whole)) for name, group in groups.items()
        ]
        self._ignored: list[str] = settings.get("ignore") or []

    @property
    def description(self) -> str:
        """A description of the format and its settings."""
        kinds = sorted({_describe(scheme) for _, scheme in self._schemes})
        return f"compressed-tensors, {' and '.join(kinds)}"

    def kernel_bits(self, layer: str, inputs: int) -> int | None:
        """Return the bits per weight that kernels store."""
        scheme = self._find(layer)
        if scheme is None or scheme.is_float or scheme.block is not None:
            return None
        if scheme.bits == 4:
            return nibble_bits(inputs, scheme.group_size)
        return 8 if scheme.rounds_inputs and scheme.symmetric and scheme.group_size == -1 else None

    def permutes_inputs(self, layer: str) -> bool:
        """Return whether inputs are not in the order of groups."""
        scheme = self._find(layer)
        return scheme is not None and scheme.permuted

    def gpu_bits(self, layer: str, inputs: int) -> float | None:
        """Return the bits per weight that a GPU's kernels store."""
        scheme = self._find(layer)
        if scheme is None or (scheme.block is not None and not scheme.is_float):
            return None
        size = scheme.group_size if scheme.block is None else scheme.block[1]
        return group_bits(scheme.bits, inputs, size)

    def covers(self, layer: str) -> bool:
        """Return whether a layer is a target and not ignored."""
        return not any(map(_matches(layer), self._ignored)) and self._find(layer) is not None

    def is_quantized(self, parts: Mapping[str, TensorHeader]) -> bool:
        """Return whether there are tensors besides a weight, or a weight that is not floats."""
        return set(parts) != {"weight"} or parts["weight"].dtype in {E4M3, "I8"}

    def check(self, layer: str, parts: Mapping[str, TensorHeader]) -> tuple[int, ...]:
        """Check the tensors of a weight; return `(outputs, inputs)`."""
        scheme = self._scheme_of(layer)
        names = ["weight_packed", "weight_shape"] if scheme.packed else ["weight"]
        names += ["weight_scale"] + ["weight_g_idx"] * scheme.permuted
        need_parts(layer, parts, names + ["weight_zero_point"] * (not scheme.symmetric))
        need(not (scheme.packed and "weight" in parts), layer, "is there twice, packed and not")
        need(scheme.packed or "weight_packed" not in parts, layer, "is packed, and must not be")
        outputs, inputs = _check_weight(layer, scheme, parts)
        scale = parts["weight_scale"]
        shapes = scheme.scale_shapes(outputs, inputs, layer)
        shape = scale.shape if scale.shape in shapes else shapes[0]
        need_header(layer, "weight_scale", scale, SCALES, shape)
        if not scheme.symmetric:
            _check_zeros(layer, scheme, parts["weight_zero_point"], outputs, shape)
        if "weight_g_idx" in parts:
            need_header(layer, "weight_g_idx", parts["weight_g_idx"], ["I32"], (inputs,))
        return outputs, inputs

    def read(self, layer: str, parts: Mapping[str, Tensor]) -> StoredWeight:
        """Return a weight."""
        scheme, scale = self._scheme_of(layer), parts["weight_scale"]
        need_finite(layer, "weight_scale", scale)
        if scheme.is_float:
            need_finite(layer, "weight", parts["weight"])
            return _scaled(scheme, parts["weight"], scale.float())
        codes = _codes(layer, scheme, parts)
        if scheme.block is not None:
            need(scheme.symmetric, layer, "has zero points of blocks")
            return Floats(times_blocks(codes.float() - scheme.offset, scale.float(), scheme.block))
        scale = scale.float().reshape(-1, scale.shape[-1] if scale.dim() > 1 else 1)
        scale = scale.expand(len(codes), -1)
        groups, inputs = scale.shape[1], codes.shape[1]
        return Integers(
            codes,
            scale,
            _zeros(scheme, parts, scale.shape) + scheme.offset,
            scheme.bits,
            group_of_inputs(layer, "weight_g_idx", parts.get("weight_g_idx"), inputs, groups),
            scheme.rounds_inputs,
        )

    def _find(self, layer: str) -> WeightScheme | None:
        """Return the scheme of the target that names a layer, else of all linear layers."""
        exact = [one for targets, one in self._schemes if any(map(_matches(layer), targets))]
        every = [one for targets, one in self._schemes if CLASS in targets]
        return next(iter(exact + every), None)

    def _scheme_of(self, layer: str) -> WeightScheme:
        scheme = self._find(layer)
        need(scheme is not None, layer, "is in no config group")
        assert scheme is not None
        return scheme


def _targets(name: str, group: Any) -> list[str]:  # noqa: ANN401 - of JSON
    targets = group.get("targets") if isinstance(group, dict) else None
    if not isinstance(targets, list) or not targets:
        raise unsupported(f"{name}.targets", targets)
    for target in targets:
        # For other class names, only a model shows the layers of that class.
        if not isinstance(target, str) or not (
            target == CLASS or target.startswith("re:") or "." in target
        ):
            raise unsupported(f"{name}.targets", target)
    return targets


def _matches(layer: str) -> Any:  # noqa: ANN401 - a predicate
    """Return a function that returns whether a target names a layer."""

    def matches(target: str) -> bool:
        if target.startswith("re:"):
            return re.match(target.removeprefix("re:"), layer) is not None
        return target == layer

    return matches


def _scheme(name: str, group: Settings, whole: object) -> WeightScheme:
    """Return the scheme of a config group.

    Raises:
        UnsupportedModelError: The message names a setting.
    """
    try:
        known(group, GROUP)
        weights: Settings = group.get("weights") or {}
        known(weights, WEIGHTS)
        inputs: Settings = group.get("input_activations") or {}
        known(inputs, INPUTS)
        layout = group.get("format") or whole
        if layout not in {PACKED, *WHOLE}:
            raise unsupported("format", layout)
        return _made(weights, inputs, packed=layout == PACKED)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"in {name}, {error}") from None


def _made(weights: Settings, inputs: Settings, *, packed: bool) -> WeightScheme:
    is_float = weights.get("type", "int") == "float"
    bits, size = weights.get("num_bits"), weights.get("group_size")
    strategy = weights.get("strategy") or ("channel" if size in {None, -1} else "group")
    block = weights.get("block_structure")
    if bits is None or ((not packed or is_float) and bits != 8) or (packed and is_float):
        raise unsupported("weights.num_bits", bits)
    if strategy == "group" and (not isinstance(size, int) or size <= 0):
        raise unsupported("weights.group_size", size)
    if (strategy == "block") != (block is not None):
        raise unsupported("weights.block_structure", block)
    symmetric = weights.get("symmetric", True)
    if is_float and not symmetric:
        raise unsupported("weights.symmetric", symmetric)
    return WeightScheme(
        packed,
        bits,
        is_float,
        symmetric,
        strategy,
        size if strategy == "group" and isinstance(size, int) else -1,
        None if block is None else (block[0], block[1]),
        weights.get("actorder") in {"group", "dynamic"},
        bool(inputs) and not is_float,
    )


def _describe(scheme: WeightScheme) -> str:
    kind = "FP8" if scheme.is_float else f"{scheme.bits} bits"
    groups = f"groups of {scheme.group_size}" if scheme.strategy == "group" else scheme.strategy
    return f"{kind} by {groups}"


def _check_weight(
    layer: str, scheme: WeightScheme, parts: Mapping[str, TensorHeader]
) -> tuple[int, int]:
    """Check a weight's type and shape; return `(outputs, inputs)`."""
    weight = parts["weight_packed" if scheme.packed else "weight"]
    need(len(weight.shape) == 2, layer, f"has the shape {list(weight.shape)}")
    outputs, columns = weight.shape
    if not scheme.packed:
        need_header(layer, "weight", weight, [E4M3 if scheme.is_float else "I8"], weight.shape)
        return outputs, columns
    need_header(layer, "weight_packed", weight, ["I32"], weight.shape)
    need_header(layer, "weight_shape", parts["weight_shape"], ["I64", "I32"], (2,))
    return outputs, columns * (32 // scheme.bits)


def _check_zeros(
    layer: str, scheme: WeightScheme, header: TensorHeader, outputs: int, scales: Sequence[int]
) -> None:
    if scheme.packed:
        rows = math.ceil(outputs * scheme.bits / 32)
        columns = scales[1] if len(scales) > 1 else 1
        need_header(layer, "weight_zero_point", header, ["I32"], (rows, columns))
    else:
        need_header(layer, "weight_zero_point", header, ["I8"], tuple(scales))


def _codes(layer: str, scheme: WeightScheme, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a weight's codes, offset to start at 0, `[outputs, inputs]` uint8."""
    if not scheme.packed:
        return (parts["weight"].short() + scheme.offset).to(torch.uint8)
    codes = unpack(parts["weight_packed"], scheme.bits, 1)
    shape = parts["weight_shape"].tolist()
    need(shape == list(codes.shape), layer, f"says that its shape is {shape}, and it is not")
    return codes


def _zeros(scheme: WeightScheme, parts: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    """Return the zero points without the offset, in float32."""
    if scheme.symmetric:
        return torch.zeros(tuple(shape))
    zeros = parts["weight_zero_point"]
    if not scheme.packed:
        return zeros.float().reshape(-1, shape[1]).expand(*shape)
    return unpack(zeros, scheme.bits, 0)[: shape[0]].float() - scheme.offset


def _scaled(scheme: WeightScheme, codes: Tensor, scale: Tensor) -> ScaledFp8:
    if scheme.strategy == "channel":
        return ScaledFp8(codes, scale.reshape(-1, 1), (1, codes.shape[1]))
    if scheme.strategy == "group":
        return ScaledFp8(codes, scale, (1, codes.shape[1] // scale.shape[1]))
    return ScaledFp8(codes, scale, scheme.block)


def _is_dense(value: Any) -> bool:  # noqa: ANN401 - of JSON
    return not value or (isinstance(value, dict) and value.get("format") == "dense")


WEIGHTS = {
    "num_bits": one_of(4, 8),
    "type": one_of("int", "float"),
    "symmetric": one_of(True, False),
    "strategy": one_of("tensor", "channel", "group", "block", None),
    "group_size": lambda value: value is None or is_group_size(value),
    "block_structure": is_block,
    "dynamic": one_of(False),
    "actorder": one_of("group", "dynamic", "weight", "static", None),
    "scale_dtype": anything,
    "zp_dtype": anything,
    "observer": anything,
    "observer_kwargs": anything,
}
"""Checks of the settings for weights."""
INPUTS = WEIGHTS | {
    "num_bits": one_of(8),
    "strategy": one_of("tensor", "token", "group", "block", None),
    "dynamic": one_of(True, False),
}
"""Checks of the settings for activations, of which only the bits matter."""
GROUP = {
    "targets": anything,
    "weights": lambda value: isinstance(value, dict),
    "input_activations": lambda value: value is None or isinstance(value, dict),
    "output_activations": one_of(None),
    "format": one_of(None, PACKED, *WHOLE),
}
"""Checks of the settings of a config group."""
ALLOWED = {
    "quant_method": one_of("compressed-tensors"),
    "format": one_of(None, PACKED, *WHOLE, "mixed-precision"),
    "config_groups": anything,
    "ignore": is_names,
    "quantization_status": one_of("compressed", "frozen"),
    "kv_cache_scheme": anything,
    "sparsity_config": _is_dense,
    "transform_config": lambda value: not value,
    "moe_sparsity_config": lambda value: not value,
    "global_compression_ratio": anything,
    "version": anything,
    "run_compressed": anything,
}
"""Checks of known settings; settings with `anything` do not affect weights."""
FORMAT = CompressedTensors
