"""Where each layer's K and V lie in the blocks of the cache.

All blocks have one size, so that all layer groups share one pool and none has memory that another
lacks. Layers of one shape make one group, or several of equal size, with 1 to 8 times the tokens
per block of the smallest: whatever fills the blocks best.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch

from octavo.common.layer_groups import LayerGroup
from octavo.engine.model_shape import LayerShape
from octavo.kernels.metadata import AttentionPlan
from octavo.kernels.ops import MAX_BLOCK_SIZE, plan_attention

Planner = Callable[[np.ndarray, np.ndarray], AttentionPlan | None]
"""`octavo.kernels.ops.plan_attention` for one group: maps query and sequence lengths to a plan."""

TYPICAL_TOKENS = 1024
"""Of a sequence, for which the layout holds the fewest bytes."""
TABLE_COST = 0.01
"""What one more group costs a step, as a share of the cache's memory."""
MOST_PIECES = 16
RATIOS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer's K and V lie.

    Attributes:
        group: The layer's group.
        keys: The first element of the keys in a block.
        values: The first element of the values.
    """

    group: int
    keys: int
    values: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The layout of a model's cache.

    Attributes:
        groups: The layer groups; those without a window come first.
        shapes: The shape of each group's layers.
        layers: The shape of each layer.
        places: The place of each layer.
        block_elements: Elements per block.
    """

    groups: tuple[LayerGroup, ...]
    shapes: tuple[LayerShape, ...]
    layers: tuple[LayerShape, ...]
    places: tuple[Place, ...]
    block_elements: int

    def planners(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
    ) -> list[Planner]:
        """Return the planner of each group's attention; see `plan_attention`."""
        return [
            partial(
                plan_attention,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.key_dim,
                dtype=dtype,
                cache_dtype=cache_dtype,
                device=device,
            )
            for shape in self.shapes
        ]

    def sequence_blocks(self, num_tokens: int) -> list[int]:
        """Return how many blocks of each group `num_tokens` tokens take if none is released."""
        return [group.blocks_for(num_tokens) for group in self.groups]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers of one shape."""

    shape: LayerShape
    layers: tuple[int, ...]

    @property
    def bounded(self) -> bool:
        return self.shape.window is not None or self.shape.chunk is not None

    def per_piece(self, pieces: int) -> int:
        return -(-len(self.layers) // pieces)


@dataclass(frozen=True, slots=True)
class _Choice:
    """How the layers of a kind are put into blocks."""

    kind: _Kind
    pieces: int
    block_size: int

    @property
    def elements(self) -> int:
        """Elements per block."""
        per_layer = self.kind.shape.token_elements * self.block_size
        return self.kind.per_piece(self.pieces) * per_layer

    @property
    def blocks(self) -> float:
        """Blocks of a typical sequence; on average, the last is half empty."""
        reach = self.kind.shape.window or self.kind.shape.chunk or TYPICAL_TOKENS
        return self.pieces * (min(reach, TYPICAL_TOKENS) / self.block_size + 0.5)


def plan_layout(layers: tuple[LayerShape, ...], block_size: int) -> CacheLayout:
    """Choose the layout of a model's cache.

    Args:
        layers: The shape of each layer's attention.
        block_size: The smallest number of tokens per block.
    """
    kinds = _kinds(layers)
    options = [_choices(kind, block_size) for kind in kinds]
    sizes = sorted({choice.elements for choices in options for choice in choices})
    least = max(min(choice.elements for choice in choices) for choices in options)
    fitting = (
        [_best([c for c in choices if c.elements <= size]) for choices in options]
        for size in sizes
        if size >= least
    )
    chosen = min(fitting, key=_cost)
    groups: list[LayerGroup] = []
    shapes: list[LayerShape] = []
    places: dict[int, Place] = {}
    for choice in chosen:
        kind, size = choice.kind, choice.block_size
        shape, count = kind.shape, kind.per_piece(choice.pieces)
        for i in range(0, len(kind.layers), count):
            for j, layer in enumerate(kind.layers[i : i + count]):
                keys = j * shape.token_elements * size
                values = keys + shape.num_kv_heads * shape.key_dim * size
                places[layer] = Place(len(groups), keys, values)
            groups.append(LayerGroup(size, shape.window, shape.chunk))
            shapes.append(shape)
    return CacheLayout(
        tuple(groups),
        tuple(shapes),
        layers,
        tuple(places[layer] for layer in range(len(layers))),
        max(choice.elements for choice in chosen),
    )


def _kinds(layers: tuple[LayerShape, ...]) -> list[_Kind]:
    """Return the layers by shape, those without a window first."""
    by_shape: dict[LayerShape, list[int]] = {}
    for layer, shape in enumerate(layers):
        by_shape.setdefault(shape, []).append(layer)
    kinds = [_Kind(shape, tuple(numbers)) for shape, numbers in by_shape.items()]
    return sorted(kinds, key=lambda kind: kind.bounded)


def _choices(kind: _Kind, block_size: int) -> list[_Choice]:
    counts = range(1, min(len(kind.layers), MOST_PIECES) + 1)
    return [
        _Choice(kind, pieces, block_size * ratio)
        for pieces, ratio in product(counts, RATIOS)
        if block_size * ratio <= MAX_BLOCK_SIZE
    ]


def _best(choices: list[_Choice]) -> _Choice:
    """Return the choice with the fewest blocks, for blocks of a given size."""
    return min(choices, key=lambda choice: choice.blocks * (1 + TABLE_COST * choice.pieces))


def _cost(chosen: list[_Choice]) -> float:
    """Return the elements that a typical sequence takes, and what its tables cost."""
    size = max(choice.elements for choice in chosen)
    tables = sum(choice.pieces for choice in chosen)
    return size * sum(choice.blocks for choice in chosen) * (1 + TABLE_COST * tables)
