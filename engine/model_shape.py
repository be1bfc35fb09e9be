"""The dimensions of a model."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One call of attention: most layers have one.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        key_dim: Elements per head of a key.
        value_dim: Elements per head of a value.
        window: A token attends to this many tokens, itself included; None: to all before it.
        chunk: A token attends to those since the last multiple of this; None: to all before it.
        source: The number of the call whose keys and values it attends to; None: its own.
        latent: Whether the first elements of a key are its value, so that no values are kept.
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
        """Elements that are kept of a token."""
        return self.num_kv_heads * (self.key_dim + (0 if self.latent else self.value_dim))


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of a sequence that one convolution or recurrence of a layer keeps.

    Attributes:
        rows: Number of rows.
        row_shape: The shape of a row.
        full_precision: Whether it is float32; else of the model's dtype.
    """

    rows: int
    row_shape: tuple[int, int]
    full_precision: bool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's dimensions, for memory and validation.

    Attributes:
        layers: Shapes of the calls of attention, in order.
        vocab_size: Tokens of the vocabulary.
        max_position: Tokens of the context.
        eos_token_ids: Tokens that end an output.
        states: Shapes of the calls that keep a state, in order.
    """

    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    states: tuple[StateShape, ...] = ()

    def has_kinds_of(self, other: "ModelShape") -> bool:
        """Return whether all kinds of another model's layers are among those of this one."""
        return _kinds(self) >= _kinds(other)


def _kinds(shape: ModelShape) -> set[object]:
    layers = {replace(layer, source=None if layer.source is None else 0) for layer in shape.layers}
    return layers | set(shape.states)
