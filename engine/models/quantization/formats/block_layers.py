"""Linear layers and embeddings with weights in GGUF's blocks, for the kernels of blocks.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from octavo.engine.models.linear.packed_linear import (
    ADAPTED,
    FUSED,
    PackedLayer,
    define_operator,
)
from octavo.engine.models.quantization.formats.gguf import Blocks
from octavo.kernels.cpu import blocks as kernels
from octavo.kernels.cpu.blocks import BlockFormat, row_addresses

DTYPES = {torch.bfloat16, torch.float32}
"""Dtypes of activations that the kernels support."""

FEW = 64
"""Number of embeddings from which a model's factor of all embeddings is found."""


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Weights for the kernels of blocks.

    Attributes:
        parts: What they are stored in, `[rows, bytes]` uint8 each, as in the file.
        addresses: `[outputs]` int64, the address of each output's row in `parts`; 0 for zeros.
        format: Format of the blocks.
        packed: The packed weights, once packed; a head and embeddings share them.
        wide: Whether outputs are float32.
        order: `[inputs]` int64, the input of each column; None if they are in order.
    """

    parts: tuple[Tensor, ...]
    addresses: Tensor
    format: BlockFormat
    packed: Tensor | None = None
    wide: bool = False
    order: Tensor | None = None

    @classmethod
    def of(
        cls,
        rows: Tensor,
        block_format: BlockFormat,
        order: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> "BlockWeights":
        """Return the weights of some rows.

        Args:
            rows: `[rows, bytes]` uint8, as in the file.
            block_format: Format of the blocks.
            order: `[outputs]` int64, the row of each output; None if they are in order.
            columns: The attribute `order`.
        """
        rows = rows.contiguous()
        return cls((rows,), row_addresses(rows, order), block_format, order=columns)

    def layer(self, linear: nn.Linear) -> PackedLayer:
        """Return a packed layer of these weights."""
        return PackedBlocksLinear(linear, self)

    def joined(
        self, others: "Sequence[BlockWeights]", join: Callable[[list[Tensor]], Tensor]
    ) -> "BlockWeights":
        """Join these weights with others."""
        every = self, *others
        return replace(
            self,
            parts=tuple(part for weights in every for part in weights.parts),
            addresses=join([weights.addresses for weights in every]),
        )

    def fits(self, other: object) -> bool:
        """Return whether the weights of two layers of the same input can be joined."""
        if not isinstance(other, BlockWeights) or other.format != self.format:
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    def for_ends(self) -> "BlockWeights":
        """Return these weights packed, for embeddings and a head."""
        return replace(self, packed=self.pack(), wide=True)

    def pack(self) -> Tensor:
        """Return the weights in the kernels' layout."""
        assert kernels is not None
        if self.packed is not None:
            return self.packed
        return kernels.pack_rows(self.addresses, self.parts[0].shape[1], self.format)


def block_weights(weight: object, dtype: torch.dtype) -> BlockWeights | None:
    """Return a stored weight for the kernels; None if they do not support it."""
    if kernels is None or dtype not in DTYPES or not isinstance(weight, Blocks):
        return None
    return BlockWeights.of(weight.stored, weight.format, weight.order)


class PackedBlocksLinear(PackedLayer):
    """A linear layer with weights in blocks.

    Args:
        linear: The layer to replace.
        weight: Its weights.

    Attributes:
        num_weights: Number of weights.
    """

    blocks: Tensor
    columns: Tensor | None

    def __init__(self, linear: nn.Linear, weight: BlockWeights) -> None:
        super().__init__(linear)
        self.number, self.wide = weight.format.number, weight.wide
        self.num_weights = linear.weight.numel()
        self.register_buffer("blocks", weight.pack())
        self.register_buffer("columns", weight.order)

    @property
    def order(self) -> Tensor | None:
        """See `PackedLayer`."""
        return self.columns

    def multiply(self, rows: Tensor) -> Tensor:
        """Map `[rows, in_features]` to `[rows, outputs]`."""
        ordered = rows if self.order is None else rows.index_select(1, self.order)
        arguments = (ordered, self.outputs, self.blocks, self.bias, self.number)
        out: Tensor = (
            torch.ops.octavo.packed_linear_blocks_wide(*arguments, self.adapted)
            if self.wide
            else torch.ops.octavo.packed_linear_blocks(*arguments, *self.stages)
        )
        return out


class PackedBlocksEmbedding(nn.Module):
    """Embeddings with weights in blocks.

    Args:
        width: The number of elements of an embedding.
        dtype: Type of embeddings: bfloat16 or float32.
        weight: The weights, packed.
        number: The format's number.
        factor: Factor of embeddings.
    """

    blocks: Tensor

    def __init__(
        self, width: int, dtype: torch.dtype, weight: Tensor, number: int, factor: float = 1.0
    ) -> None:
        super().__init__()
        self.width, self.dtype, self.number, self.factor = width, dtype, number, factor
        self.register_buffer("blocks", weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Map `[...]` int64 to `[..., width]`."""
        look_up = (
            torch.ops.octavo.packed_embedding
            if self.dtype == torch.bfloat16
            else torch.ops.octavo.packed_embedding_wide
        )
        out: Tensor = look_up(ids.reshape(-1), self.width, self.blocks, self.number)
        out = out.reshape(*ids.shape, -1)
        return out if self.factor == 1 else out * self.factor


@torch.inference_mode()
def embedding_factor(layer: nn.Module) -> float | None:
    """Return the factor of embeddings, such as Gemma's; None if there is no such factor."""
    if type(layer) is nn.Embedding:
        return 1.0
    scale = getattr(layer, "embed_scale", None)
    if not isinstance(layer, nn.Embedding) or not isinstance(scale, Tensor) or scale.numel() != 1:
        return None
    ids = torch.arange(min(FEW, layer.num_embeddings), device=layer.weight.device)
    factor = float(scale.to(layer.weight.dtype))
    return factor if torch.equal(layer(ids), embedding(ids, layer.weight) * factor) else None


define_operator(
    "packed_linear_blocks(Tensor x, int outputs, Tensor blocks, Tensor bias, int number,"
    f" {FUSED}) -> Tensor",
)
define_operator(
    "packed_linear_blocks_wide(Tensor x, int outputs, Tensor blocks, Tensor bias, int number,"
    f" {ADAPTED}) -> Tensor",
    torch.float32,
)
define_operator(
    "packed_embedding(Tensor ids, int width, Tensor blocks, int number) -> Tensor",
    torch.bfloat16,
)
define_operator(
    "packed_embedding_wide(Tensor ids, int width, Tensor blocks, int number) -> Tensor",
    torch.float32,
)
