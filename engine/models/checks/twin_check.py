"""Checks the structure of a large model with a small twin."""

import structlog
from torch import nn
from transformers import PreTrainedModel

from octavo.common.models.errors import first_line
from octavo.engine.attention.latent import absorb_expansions
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.attention_layers import reference_attention, replace_attention
from octavo.engine.models.checks.module_routing import ModuleRouting
from octavo.engine.models.checks.probe import attention_of
from octavo.engine.models.checks.reference import reference
from octavo.engine.models.checks.structure import check_in_float32
from octavo.engine.models.checks.twin import make_twin
from octavo.engine.models.dimensions import find_dimensions
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.model_source import ModelSource
from octavo.engine.models.vision import split_vision

log = structlog.get_logger(__name__)


def check_twin(
    model: PreTrainedModel, shape: ModelShape, source: ModelSource, block_size: int
) -> bool:
    """Check the structure of a large model with a small twin.

    Args:
        model: The large model.
        shape: The large model's dimensions.
        source: The large model's files, and how to read them.
        block_size: Tokens per block.

    Returns:
        False if no twin has all kinds of its layers.

    Raises:
        SelfCheckError: The twin's results differ from those of transformers' forward pass.
    """
    try:
        twin = make_twin(model)
        split_vision(twin)
        nn.Module.to(twin, source.device)
        replace_attention(twin)
        twin_shape = find_dimensions(twin, source.max_model_len)
    except Exception as error:  # noqa: BLE001 - transformers raises many types
        log.info("the model has no small twin: it is checked itself", why=first_line(error))
        return False
    if not twin_shape.has_kinds_of(shape):
        log.info("the model has no small twin: it is checked itself", why="other layers")
        return False
    routing = ModuleRouting(twin)
    with attention_of(twin, reference_attention(twin.config)):
        expected = reference(twin, twin_shape, routing)
    absorb_expansions(twin)
    check_in_float32(
        twin,
        EagerForward(twin),
        expected,
        twin_shape,
        source.device,
        block_size=block_size,
        routing=routing,
    )
    return True
