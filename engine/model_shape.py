"""The dimensions of a model."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention call: most layers have one.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        key_dim: Elements per head of a key.
        value_dim: Elements per head of a value.
        window: Number of tokens that a token attends to, including itself; None: all before it.
        chunk: Chunk length: a token attends to its chunk's tokens up to itself; None: no chunks.
        source: The number of the call whose keys and values it uses; None: its own.
        latent: Whether the first elements of a key are its value, so that the cache has no values.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunk: int | None = None
    source: int | None = None
    latent: bool = False

    @property
    def token_elements(self) -> int:
        """Cached elements per token."""
        return self.num_kv_heads * (self.key_dim + (0 if self.latent else self.value_dim))


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state that one convolution or recurrence of a layer keeps per sequence.

    Attributes:
        rows: Number of rows.
        row_shape: The shape of a row.
        full_precision: Whether it is float32; else it has the model's dtype.
    """

    rows: int
    row_shape: tuple[int, int]
    full_precision: bool


@dataclass(frozen=True, slots=True)
class StagePart:
    """The part of a model that a stage of a pipeline computes.

    Attributes:
        layers: The numbers of its attention calls.
        states: The numbers of its calls that keep a state.
    """

    layers: range
    states: range


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's dimensions, for memory and validation.

    Attributes:
        layers: Shapes of the attention calls, in order.
        vocab_size: Tokens of the vocabulary.
        max_position: Tokens of the context.
        eos_token_ids: Tokens that end an output.
        states: Shapes of the calls that keep a state, in order.
        part: The calls of this process's stage; None if it computes all layers.
    """

    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    states: tuple[StateShape, ...] = ()
    part: StagePart | None = None

    def has_kinds_of(self, other: "ModelShape") -> bool:
        """Return whether this model has all kinds of another model's layers."""
        return _kinds(self) >= _kinds(other)


def _kinds(shape: ModelShape) -> set[object]:
    layers = {replace(layer, source=None if layer.source is None else 0) for layer in shape.layers}
    return layers | set(shape.states)
