"""The locations of each layer's K and V, and of its states, in the cache's blocks.

All blocks have one size, so that all layer groups share one pool and no group has spare memory that
another lacks. Layers of one shape form one group, or several of equal size, with 1 to 8 times the
smallest tokens per block: whichever fills the blocks best.

Stages of a pipeline have the groups of the whole model, so that block numbers mean the same in all,
but in their blocks only their own layers and states.
"""

from dataclasses import dataclass, replace
from itertools import product

import torch

from octavo.common.kv_cache.layer_groups import LayerGroup
from octavo.engine.model_shape import LayerShape, ModelShape, StagePart, StateShape
from octavo.kernels.metadata import AttentionShape
from octavo.kernels.ops import MAX_BLOCK_SIZE
from octavo.kernels.whole_numbers import width_of

TYPICAL_TOKENS = 1024
"""Sequence length for which the layout is chosen to use the fewest bytes."""
TABLE_COST = 0.01
"""Cost of one more group's block tables, as a share of the cache's memory."""
MAX_PIECES = 16
ALIGNMENT = 64
RATIOS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The location of a layer's K and V in blocks.

    Attributes:
        group: The layer's group.
        keys: Offset of the keys in a block, in elements.
        values: Offset of the values in a block; meaningless if there are none.
    """

    group: int
    keys: int
    values: int


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The location of a state in blocks.

    Attributes:
        group: The state's group.
        first_row: Its first row in a sequence's blocks.
        rows_per_block: Rows in each block.
    """

    group: int
    first_row: int
    rows_per_block: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The layout of a model's cache.

    Attributes:
        shape: The model's dimensions, or those of this stage's part.
        groups: The model's layer groups: first those without a window, then windows, then states.
        shapes: The shape of each attention group's layers.
        places: The location of each layer.
        states: The location of each state.
        block_elements: Elements of the cache's dtype per block.
    """

    shape: ModelShape
    groups: tuple[LayerGroup, ...]
    shapes: tuple[LayerShape, ...]
    places: tuple[LayerPlace, ...]
    states: tuple[StatePlace, ...]
    block_elements: int

    def attention_shapes(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
    ) -> list[AttentionShape | None]:
        """Return the shape that each group's attention is planned for; None for states."""
        shapes = [
            AttentionShape(
                shape.num_heads,
                shape.num_kv_heads,
                shape.key_dim,
                shape.value_dim,
                dtype,
                cache_dtype,
                device,
                latent=shape.latent,
                span=shape.window or shape.chunk,
            )
            for shape in self.shapes
        ]
        return [*shapes, *[None] * (len(self.groups) - len(shapes))]

    def sequence_blocks(self, num_tokens: int) -> list[int]:
        """Return the blocks that `num_tokens` tokens take in each group, if none is released."""
        return [group.state_blocks or group.blocks_for(num_tokens) for group in self.groups]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers with one shape."""

    shape: LayerShape
    layers: tuple[int, ...]
    cache_dtype: torch.dtype

    @property
    def key_elements(self) -> int:
        """Cached elements of a token's keys."""
        return self.shape.num_kv_heads * width_of(self.shape.key_dim, self.cache_dtype)

    @property
    def token_elements(self) -> int:
        """Cached elements of a token's keys and values."""
        if self.shape.latent:
            return self.key_elements
        of_values = self.shape.num_kv_heads * width_of(self.shape.value_dim, self.cache_dtype)
        return self.key_elements + of_values

    @property
    def bounded(self) -> bool:
        return self.shape.window is not None or self.shape.chunk is not None

    def per_piece(self, pieces: int) -> int:
        return -(-len(self.layers) // pieces)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A way to pack a kind of layers into blocks."""

    kind: _Kind
    pieces: int
    block_size: int

    @property
    def elements(self) -> int:
        """Elements per block."""
        per_layer = self.kind.token_elements * self.block_size
        return self.kind.per_piece(self.pieces) * per_layer

    @property
    def groups(self) -> int:
        """Number of groups of the pieces; the last may be incomplete."""
        return -(-len(self.kind.layers) // self.kind.per_piece(self.pieces))

    @property
    def blocks(self) -> float:
        """Number of blocks of a typical sequence; on average, the last is half empty."""
        reach = self.kind.shape.window or self.kind.shape.chunk or TYPICAL_TOKENS
        return self.pieces * (min(reach, TYPICAL_TOKENS) / self.block_size + 0.5)


@dataclass(frozen=True, slots=True)
class _StateKind:
    """States with rows of one shape."""

    numbers: tuple[int, ...]
    rows: int  # in total
    row_elements: int

    def blocks(self, size: int) -> int:
        """Return the number of blocks per sequence if a block has `size` elements."""
        return -(-self.rows // (size // self.row_elements))


def plan_layout(
    shape: ModelShape, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> CacheLayout:
    """Choose the layout of a model's cache.

    Args:
        shape: The model's dimensions.
        block_size: The smallest number of tokens per block.
        dtype: Type of the model.
        cache_dtype: Type of keys and values.
    """
    options = [_choices(kind, block_size) for kind in _kinds(shape.layers, cache_dtype)]
    states = _state_kinds(shape.states, dtype, cache_dtype)
    sizes = {choice.elements for choices in options for choice in choices}
    sizes |= {
        -(-kind.rows // count) * kind.row_elements
        for kind in states
        for count in range(1, MAX_PIECES + 1)
    }
    least = max(
        [min(choice.elements for choice in choices) for choices in options]
        + [kind.row_elements for kind in states]
    )
    fitting = (
        (size, [_best([c for c in choices if c.elements <= size]) for choices in options])
        for size in sorted({_aligned(size) for size in sizes})
        if size >= least
    )
    size, chosen = min(fitting, key=lambda one: _cost(one[0], one[1], states))
    part = shape.part or StagePart(range(len(shape.layers)), range(len(shape.states)))
    groups: list[LayerGroup] = []
    places: dict[int, LayerPlace] = {}
    taken = [_place_layers(choice, groups, places, part.layers) for choice in chosen]
    shapes = tuple(c.kind.shape for c in chosen for _ in range(c.groups))
    state_places: dict[int, StatePlace] = {}
    for kind in states:
        own = [number for number in kind.numbers if number in part.states]
        first, per_block = 0, size // kind.row_elements
        if shape.part is not None:
            per_block = -(-sum(shape.states[n].rows for n in own) // kind.blocks(size))
        taken.append(per_block * kind.row_elements)
        for number in own:
            state_places[number] = StatePlace(len(groups), first, per_block)
            first += shape.states[number].rows
        groups.append(LayerGroup(block_size, state_blocks=kind.blocks(size)))
    return CacheLayout(
        _own_part(shape, part),
        tuple(groups),
        shapes,
        tuple(places[_keeper(shape, layer)] for layer in part.layers),
        tuple(state_places[number] for number in part.states),
        size if shape.part is None else _aligned(max(taken)),
    )


def _own_part(shape: ModelShape, part: StagePart) -> ModelShape:
    """Return the dimensions of a stage's part."""
    first = part.layers.start
    layers = [
        layer if layer.source is None else replace(layer, source=layer.source - first)
        for layer in shape.layers[first : part.layers.stop]
    ]
    states = shape.states[part.states.start : part.states.stop]
    return replace(shape, layers=tuple(layers), states=states, part=None)


def _keeper(shape: ModelShape, layer: int) -> int:
    """Return the layer whose keys and values a layer uses."""
    source = shape.layers[layer].source
    return layer if source is None else source


def _aligned(elements: int) -> int:
    """Round up a number of elements, so that blocks are aligned for vectors of any type."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _place_layers(
    choice: _Choice, groups: list[LayerGroup], places: dict[int, LayerPlace], own: range
) -> int:
    """Append a kind's groups, and record the locations of its own layers; return a block's size."""
    kind, size = choice.kind, choice.block_size
    shape, count = kind.shape, kind.per_piece(choice.pieces)
    most = 0
    for i in range(0, len(kind.layers), count):
        keys = 0
        for layer in kind.layers[i : i + count]:
            if layer in own:
                places[layer] = LayerPlace(len(groups), keys, keys + kind.key_elements * size)
                keys += kind.token_elements * size
        most = max(most, keys)
        groups.append(LayerGroup(size, shape.window, shape.chunk))
    return most


def _state_kinds(
    states: tuple[StateShape, ...], dtype: torch.dtype, cache_dtype: torch.dtype
) -> list[_StateKind]:
    """Return the states by the shape and dtype of their rows."""
    by_row: dict[tuple[tuple[int, int], bool], list[int]] = {}
    for number, state in enumerate(states):
        by_row.setdefault((state.row_shape, state.full_precision), []).append(number)
    kinds = []
    for (row_shape, full_precision), numbers in by_row.items():
        itemsize = torch.float32.itemsize if full_precision else dtype.itemsize
        row_bytes = row_shape[0] * row_shape[1] * itemsize
        rows = sum(states[number].rows for number in numbers)
        kinds.append(_StateKind(tuple(numbers), rows, -(-row_bytes // cache_dtype.itemsize)))
    return kinds


def _kinds(layers: tuple[LayerShape, ...], cache_dtype: torch.dtype) -> list[_Kind]:
    """Return the layers that have keys and values by shape; those without a window come first."""
    by_shape: dict[LayerShape, list[int]] = {}
    for layer, shape in enumerate(layers):
        if shape.source is None:
            by_shape.setdefault(shape, []).append(layer)
    kinds = [_Kind(shape, tuple(numbers), cache_dtype) for shape, numbers in by_shape.items()]
    return sorted(kinds, key=lambda kind: kind.bounded)


def _choices(kind: _Kind, block_size: int) -> list[_Choice]:
    counts = range(1, min(len(kind.layers), MAX_PIECES) + 1)
    return [
        _Choice(kind, pieces, block_size * ratio)
        for pieces, ratio in product(counts, RATIOS)
        if block_size * ratio <= MAX_BLOCK_SIZE
    ]


def _best(choices: list[_Choice]) -> _Choice:
    """Return the choice with the fewest blocks, for blocks of a given size."""
    return min(choices, key=lambda choice: choice.blocks * (1 + TABLE_COST * choice.pieces))


def _cost(size: int, chosen: list[_Choice], states: list[_StateKind]) -> float:
    """Return the elements of a typical sequence, including the cost of its tables."""
    tables = sum(choice.pieces for choice in chosen) + len(states)
    blocks = sum(choice.blocks for choice in chosen) + sum(kind.blocks(size) for kind in states)
    return size * blocks * (1 + TABLE_COST * tables)
