"""Packs a quantized checkpoint's integers unchanged for the CPU kernels.

- Weights in 4 or 2 bits run as blocks of GGUF's Q4_1, with inputs rounded to bytes. Blocks have a
  scale per 32 inputs, so larger groups' scales are repeated. Inputs are gathered in the groups'
  order. Experts in 4 bits run with inputs in 16 bits.
- Weights in GGUF's blocks run unchanged, including embeddings and the head.
- Experts in e2m1 run unchanged, with inputs in 16 bits.
- Weights in 8 bits with a scale per output run with inputs in 8 bits, if the checkpoint is made for
that.

All others are dequantized to the model's dtype, as transformers loads them here. A weight is packed
only if transformers loaded it unchanged, under any name, so that no weight is mistaken for another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.engine.models.deferred import held
from octavo.engine.models.experts.expert_layer import ExpertLayer, find_experts
from octavo.engine.models.experts.packed_experts import (
    PackedExperts,
    arranged,
    padded,
    stacked,
)
from octavo.engine.models.experts.packed_experts import has_kernels as has_expert_kernels
from octavo.engine.models.linear.fuse_linears import (
    LocatedLinear,
    group_linears_by_input,
    join_linears,
    split_alike,
)
from octavo.engine.models.linear.packed_linear import (
    PackedLayer,
    has_quantized_kernels,
    replace,
)
from octavo.engine.models.quantization.formats.base import ZERO_OF_BYTES, Integers, in_groups
from octavo.engine.models.quantization.formats.block_layers import (
    BlockWeights,
    PackedBlocksEmbedding,
    block_weights,
    embedding_factor,
)
from octavo.engine.models.quantization.formats.e2m1_experts import pack_e2m1
from octavo.engine.models.quantization.formats.report import log_widened
from octavo.engine.models.quantization.formats.stored_experts import (
    StoredExpert,
    stored_experts,
)
from octavo.engine.models.quantization.int8 import SCHEME as INT8
from octavo.engine.models.quantization.int8 import PackedInt8Linear
from octavo.engine.models.quantization.rounding import sum_rows
from octavo.engine.models.read_weights import QuantizedCheckpoint, find_stored
from octavo.engine.models.sharding.sharded_layers import VocabularyEmbedding
from octavo.kernels.cpu import experts as expert_kernels
from octavo.kernels.cpu import linear as kernels
from octavo.kernels.cpu.blocks import FORMATS, to_q4_1
from octavo.kernels.cpu.experts import PackedProduct
from octavo.kernels.cpu.linear import GROUP

Join = Callable[[list[Tensor]], Tensor]
"""Joins the outputs of several layers into one tensor."""

MIDDLE = 8
"""Number that the kernels subtract from a 4-bit code."""


@dataclass(frozen=True, slots=True)
class Nibbles:
    """Weights for the 4-bit kernels: `(codes - MIDDLE) * scale + zero`.

    Attributes:
        codes: `[outputs, inputs / GROUP, GROUP]` uint8, from 0 to 15.
        scale: `[outputs, inputs / GROUP]` float32.
        zero: `[outputs, inputs / GROUP]` float32.
        order: `[inputs]` int64, the input of each column; None if they are in order.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    order: Tensor | None

    def blocks(self) -> BlockWeights:
        """Return the weights of a linear layer."""
        rows = to_q4_1(self.codes, self.scale, self.zero - MIDDLE * self.scale)
        return BlockWeights.of(rows, FORMATS["Q4_1"], columns=self.order)

    def joined(self, others: "Sequence[Nibbles]", join: Join) -> "Nibbles":
        """Join these weights with others whose inputs are in the same order."""
        every = [self, *others]
        return Nibbles(
            join([one.codes for one in every]),
            join([one.scale for one in every]),
            join([one.zero for one in every]),
            self.order,
        )

    def fits(self, other: object) -> bool:
        """Return whether the weights of two layers of the same input can be joined."""
        if not isinstance(other, Nibbles) or (self.order is None) != (other.order is None):
            return False
        return self.order is None or other.order is None or torch.equal(self.order, other.order)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Weights for the 8-bit kernels: `codes * scale`.

    Attributes:
        codes: `[outputs, inputs]` int8.
        scale: `[outputs]` float32.
    """

    codes: Tensor
    scale: Tensor

    def layer(self, linear: nn.Linear) -> PackedLayer:
        """Return a packed layer of these weights."""
        row_sums = sum_rows(self.codes, self.scale)
        factors = torch.ones(linear.in_features)
        return PackedInt8Linear(linear, self.codes, self.scale, row_sums, factors)

    def joined(self, others: "Sequence[Bytes]", join: Join) -> "Bytes":
        """Join these weights with others."""
        every = [self, *others]
        return Bytes(join([one.codes for one in every]), join([one.scale for one in every]))

    def fits(self, other: object) -> bool:
        """Return whether the weights of two layers of the same input can be joined."""
        return isinstance(other, Bytes)


Packable = Bytes | BlockWeights
"""Weights in the kernels' form."""


def for_kernels(weight: object) -> Nibbles | Bytes | None:
    """Return a stored weight for the kernels; None if no kernel supports it."""
    if not isinstance(weight, Integers):
        return None
    groups, size = weight.scale.shape[1], weight.group_size
    if weight.bits == 8:
        as_bytes = (
            weight.rounds_inputs and groups == 1 and bool((weight.zero == ZERO_OF_BYTES).all())
        )
        if not as_bytes:
            return None
        codes = (weight.codes.short() - ZERO_OF_BYTES).to(torch.int8)
        return Bytes(codes, weight.scale[:, 0].contiguous())
    if size is None or not in_groups(weight.codes.shape[1], size):
        return None
    order = weight.order()
    # Codes and zero points are shifted together, so that zero points are near 0: experts' zero
    # points are rounded to bfloat16, which is more precise near 0.
    shift = MIDDLE - (1 << (weight.bits - 1))
    codes = (weight.codes if order is None else weight.codes[:, order]) + shift
    repeats = size // GROUP
    scale = weight.scale.float()
    zero = (MIDDLE - shift - weight.zero) * scale
    return Nibbles(
        codes.reshape(len(codes), -1, GROUP),
        scale.repeat_interleave(repeats, 1),
        zero.repeat_interleave(repeats, 1),
        order,
    )


class _Packing:
    """Packs the layers of one model."""

    def __init__(self, model: PreTrainedModel, checkpoint: QuantizedCheckpoint) -> None:
        self.tolerance = 0.0
        self.packed = 0
        self._model = model
        self._checkpoint = checkpoint
        self._weights: dict[nn.Module, Packable] = {}

    def pack_linears(self) -> None:
        """Replace linear layers if all layers with the same input can be packed."""
        head = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        groups = group_linears_by_input(self._model)
        while groups:
            group = groups.pop()  # frees each once replaced
            if group[0].layer is head:
                continue  # see pack_ends
            weights: list[Packable | None] = [self._find(located) for located in group]
            if any(isinstance(one, BlockWeights) for one in weights):
                parts: list[tuple[list[LocatedLinear], list[Packable]]] = split_alike(
                    group, weights
                )
                for alike, packable in parts:
                    self._replace(alike, packable)
                continue
            first = weights[0]
            known = [one for one in weights if one is not None]
            if first is None or len(known) < len(group) or not all(map(first.fits, known)):
                continue
            self._replace(group, known)
            if isinstance(first, Bytes):
                self.tolerance = INT8.tolerance

    def pack_ends(self) -> None:
        """Replace embeddings and the head, if they are in blocks; tied ones share them."""
        embeddings: nn.Module = self._model.get_input_embeddings()
        if isinstance(embeddings, VocabularyEmbedding):
            embeddings = embeddings.embedding
        head: nn.Module | None = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        paths = {module: path for path, module in self._model.named_modules()}
        shared: dict[Tensor, BlockWeights] = {}
        for layer in (embeddings, head):
            if layer is None or layer not in paths:
                continue
            weight = getattr(layer, "weight", None)
            if not isinstance(weight, nn.Parameter):
                continue
            factor = 1.0 if type(layer) is nn.Linear else embedding_factor(layer)
            if factor is None:
                continue
            blocks = shared.get(weight) or self._find_blocks(weight)
            if blocks is None:
                continue
            blocks = blocks.for_ends()
            if weight not in shared:
                self.packed += weight.numel()
            shared[weight] = blocks
            parent, _, name = paths[layer].rpartition(".")
            setattr(self._model.get_submodule(parent), name, _end(layer, weight, blocks, factor))

    def _replace(self, group: list[LocatedLinear], weights: Sequence[Packable]) -> None:
        self._weights = {located.layer: one for located, one in zip(group, weights, strict=True)}
        replace(self._model, group, self._convert, self._join)
        self.packed += sum(located.layer.weight.numel() for located in group)
        self._checkpoint.give_back()

    def pack_experts(self) -> None:
        """Replace expert layers if all their experts can be packed."""
        for layer in find_experts(self._model):
            if layer.dtype != torch.bfloat16 or not has_expert_kernels(layer, torch.uint8):
                continue  # the kernel would round rows in float32
            with held(layer.module):
                experts = list(stored_experts(self._checkpoint, layer))
            if len(experts) < layer.count:
                continue
            if made := pack_e2m1(layer, experts) or _pack_nibbles(layer, experts):
                self.packed += layer.elements
                layer.replace(made)

    def _find_blocks(self, weight: Tensor) -> BlockWeights | None:
        """Return a weight in blocks; None if the file stores it otherwise."""
        stored = find_stored(weight)
        return block_weights(stored, weight.dtype)

    def _find(self, located: LocatedLinear) -> Packable | None:
        """Return a layer's weights for the kernels; None if the file stores them otherwise."""
        stored = find_stored(located.layer.weight)
        if (blocks := block_weights(stored, located.layer.weight.dtype)) is not None:
            return blocks
        if not has_quantized_kernels(located.layer):
            return None
        own_weights = for_kernels(stored)
        return own_weights.blocks() if isinstance(own_weights, Nibbles) else own_weights

    def _convert(self, linear: nn.Linear) -> PackedLayer:
        return self._weights[linear].layer(linear)

    def _join(self, layers: list[nn.Linear], join: Join) -> nn.Linear:
        first, *others = (self._weights[layer] for layer in layers)
        joined = join_linears(layers, join)
        self._weights[joined] = first.joined(others, join)  # type: ignore[arg-type]
        return joined


def pack_checkpoint(model: PreTrainedModel, checkpoint: QuantizedCheckpoint) -> float:
    """Replace the layers whose stored weights the CPU kernels support unchanged.

    Args:
        model: A model on a CPU, with the checkpoint's weights dequantized; changed in place.
        checkpoint: Its checkpoint.

    Returns:
        The tolerance of the self-check; see `Scheme`.
    """
    packing = _Packing(model, checkpoint)
    if kernels is not None:
        packing.pack_linears()
        packing.pack_experts()
        packing.pack_ends()
    log_widened(model, checkpoint, packing.packed)
    return packing.tolerance


def _end(layer: nn.Module, weight: nn.Parameter, blocks: BlockWeights, factor: float) -> nn.Module:
    """Return a packed layer for a head, or for embeddings, which have a factor."""
    if isinstance(layer, nn.Linear):
        return blocks.layer(layer)
    number = blocks.format.number
    return PackedBlocksEmbedding(weight.shape[1], weight.dtype, blocks.pack(), number, factor)


def _pack_nibbles(layer: ExpertLayer, experts: Sequence[StoredExpert]) -> PackedExperts | None:
    """Return a layer's experts in 4 bits; None if they are stored otherwise."""
    ups, downs = [], []
    for stored, own_down in experts:
        up, *others, down = map(for_kernels, (*stored, own_down))
        if not isinstance(up, Nibbles) or not isinstance(down, Nibbles):
            return None
        if not all(map(up.fits, others)) or up.order is not None or down.order is not None:
            return None
        ups.append(up.joined(others, torch.cat))  # type: ignore[arg-type]
        downs.append(down)

    def product(name: str, weights: list[Nibbles], bias: Callable[[int], Tensor]) -> PackedProduct:
        return PackedProduct(
            stacked(layer.count, lambda number: _panels(layer, name, weights[number])),
            stacked(layer.count, lambda number: padded(layer, name, bias(number))),
        )

    first, second = product("up", ups, layer.up_bias), product("down", downs, layer.down_bias)
    return PackedExperts(layer.activation, first, second)


def _panels(layer: ExpertLayer, name: str, weight: Nibbles) -> Tensor:
    assert expert_kernels is not None
    codes, *scales = (
        arranged(layer, name, part) for part in (weight.codes, weight.scale, weight.zero)
    )
    return expert_kernels.linear.pack_int4(codes, *(part.bfloat16() for part in scales))
