"""GPTQ (Frantar et al. 2022), as AutoGPTQ and GPTQModel write it.

A word of `qweight` `[inputs * bits / 32, outputs]` int32 holds consecutive inputs, a word of
`qzeros` `[groups, outputs * bits / 32]` consecutive outputs; `scales` is `[groups, outputs]`. A
weight is `(code - zero) * scale`. Checkpoints of version 1 ("gptq") store the zero minus one.
`g_idx` `[inputs]` is the group of each input, in any order with activation order ("desc_act").
"""

from collections.abc import Mapping
from typing import ClassVar

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

SHIFTED = 1
"""Number that version 1 subtracts from zeros."""


class Gptq(Format):
    """GPTQ with 2, 4 or 8 bits."""

    endings: ClassVar = {
        ".qweight": "qweight",
        ".qzeros": "qzeros",
        ".scales": "scales",
        ".g_idx": "g_idx",
    }

    def __init__(self, settings: Settings) -> None:
        known(settings, ALLOWED)
        for name in ("bits", "group_size"):
            if name not in settings:
                raise unsupported(name, None)
        self._bits: int = settings["bits"]
        self._size: int = settings["group_size"]
        self._act_order = bool(settings.get("desc_act"))
        versions = {settings[name] for name in VERSIONS if settings.get(name)} or {"gptq"}
        if len(versions) > 1:
            raise unsupported("checkpoint_format", settings["checkpoint_format"])
        self._shift = SHIFTED if versions == {"gptq"} else 0
        self._takes_head = settings.get("lm_head") is True

    @property
    def description(self) -> str:
        """A description of the format and its settings."""
        order = ", activation order" if self._act_order else ""
        return f"GPTQ, {self._bits} bits, groups of {self._size}{order}"

    def kernel_bits(self, layer: str, inputs: int) -> int | None:  # noqa: ARG002
        """Return the bits per weight that kernels store; none support 8 bits."""
        return nibble_bits(inputs, self._size) if self._bits < 8 else None

    def permutes_inputs(self, layer: str) -> bool:  # noqa: ARG002
        """Return whether inputs are not in the order of groups."""
        return self._act_order and self._size != -1

    def gpu_bits(self, layer: str, inputs: int) -> float | None:  # noqa: ARG002
        """Return the bits per weight that a GPU's kernels store."""
        return group_bits(self._bits, inputs, self._size)

    def covers(self, layer: str) -> bool:
        """Return whether a layer is quantized: all are, usually except the head."""
        return self._takes_head or not layer.endswith("lm_head")

    def check(self, layer: str, parts: Mapping[str, TensorHeader]) -> tuple[int, ...]:
        """Check the tensors of a weight; return `(outputs, inputs)`."""
        need_parts(layer, parts, ("qweight", "qzeros", "scales"))
        need(not self._act_order or "g_idx" in parts, layer, "has no g_idx, but activation order")
        weight, per_word = parts["qweight"], 32 // self._bits
        need(len(weight.shape) == 2, layer, f"has qweight of shape {list(weight.shape)}")
        inputs, outputs = weight.shape[0] * per_word, weight.shape[1]
        groups = groups_of(layer, inputs, self._size)
        need(outputs % per_word == 0, layer, f"has {outputs} outputs, which fill no whole words")
        need_header(layer, "qweight", weight, ["I32"], weight.shape)
        need_header(layer, "qzeros", parts["qzeros"], ["I32"], (groups, outputs // per_word))
        need_header(layer, "scales", parts["scales"], SCALES, (groups, outputs))
        if "g_idx" in parts:
            need_header(layer, "g_idx", parts["g_idx"], ["I32"], (inputs,))
        return outputs, inputs

    def read(self, layer: str, parts: Mapping[str, Tensor]) -> Integers:
        """Return a weight."""
        need_finite(layer, "scales", parts["scales"])
        stored = unpack(parts["qzeros"], self._bits, 1)
        # Tools disagree about 2^bits - 1 plus one: some read 0, others 2^bits.
        need(
            not self._shift or int(stored.max()) < 2**self._bits - 1,
            layer,
            f"has the zero point {2**self._bits}, which version 1 of GPTQ's format cannot hold",
        )
        codes = unpack(parts["qweight"], self._bits, 0).t()
        groups, inputs = len(parts["scales"]), codes.shape[1]
        return Integers(
            codes,
            parts["scales"].float().t(),
            stored.float().t() + self._shift,
            self._bits,
            group_of_inputs(layer, "g_idx", parts.get("g_idx"), inputs, groups),
        )


VERSIONS = ("checkpoint_format", "format")
ALLOWED = {
    "quant_method": one_of("gptq"),
    "bits": one_of(2, 4, 8),
    "group_size": is_group_size,
    "desc_act": one_of(True, False),
    "sym": one_of(True, False),
    "checkpoint_format": one_of("gptq", "gptq_v2"),
    "format": one_of("gptq", "gptq_v2"),
    "lm_head": one_of(True, False),
    "true_sequential": anything,
    "static_groups": anything,
    "damp_percent": anything,
    "meta": anything,
    "pack_dtype": one_of("int32"),
    "dynamic": lambda value: not value,
    "model_name_or_path": anything,
    "model_file_base_name": anything,
    "model_seqlen": anything,
    "block_name_to_quantize": anything,
    "module_name_preceding_first_block": anything,
    "modules_in_block_to_quantize": anything,
    "is_marlin_format": one_of(False, None),
    "batch_size": anything,
    "cache_block_outputs": anything,
    "cache_examples_on_gpu": anything,
    "dataset": anything,
    "tokenizer": anything,
    "pad_token_id": anything,
    "use_cuda_fp16": anything,
    "use_exllama": anything,
    "exllama_config": anything,
    "disable_exllama": anything,
    "max_input_length": anything,
    "backend": anything,
    "modules_to_not_convert": is_names,
}
"""Checks of known settings; settings with `anything` do not affect weights."""
FORMAT = Gptq
