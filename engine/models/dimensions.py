"""A model's dimensions, from its config and a run of the model."""

from typing import Any

from transformers import PreTrainedModel

from octavo.engine.model_shape import ModelShape
from octavo.engine.models.checks.masks import MAX_POSITIONS
from octavo.engine.models.checks.probe import probe
from octavo.engine.models.rope import fix_rope

CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length")
"""Config names of the context's length."""
DEFAULT_CONTEXTS = {"bloom": 2048}
"""Contexts by model type, for models whose configs may lack them. Bloom was trained with 2,048
tokens (Le Scao et al. 2022, table 3)."""


def find_dimensions(model: PreTrainedModel, max_model_len: int | None) -> ModelShape:
    """Return a model's dimensions, from its config and a run of the model.

    Raises:
        NotImplementedError: No kernel computes its attention.
    """
    config: Any = model.config.get_text_config(decoder=True)
    context = fix_context(model, max_model_len)
    layers, states = probe(model, MAX_POSITIONS if context is None else context)
    if context is None:
        if layers:
            raise NotImplementedError("its config has no max_position_embeddings")
        context = MAX_POSITIONS  # states alone have no limit
    return ModelShape(
        layers,
        vocab_size=config.vocab_size,
        max_position=context,
        eos_token_ids=_eos_token_ids(model),
        states=states,
    )


def fix_context(model: PreTrainedModel, max_model_len: int | None) -> int | None:
    """Fix a model's rotary frequencies; return its context, None if its config lacks it."""
    context = _context(model.config.get_text_config(decoder=True))
    return None if context is None else fix_rope(model, context, max_model_len)


def _context(config: Any) -> int | None:  # noqa: ANN401 - no declared field
    """Return the length of a model's context; None if its config lacks it."""
    named = (getattr(config, name, None) for name in CONTEXT_NAMES)
    default = DEFAULT_CONTEXTS.get(config.model_type)
    return next((tokens for tokens in named if isinstance(tokens, int)), default)


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the end tokens of both configs: often only one names the end of a chat turn."""
    config: Any = model.config.get_text_config(decoder=True)
    generation_ids = _ids(getattr(model.generation_config, "eos_token_id", None))
    return tuple(sorted({*_ids(getattr(config, "eos_token_id", None)), *generation_ids}))


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
