"""Checks the structure of a large model with a small twin."""

from dataclasses import replace

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
from octavo.engine.models.forward import EagerForward, Forward
from octavo.engine.models.model_source import ModelSource
from octavo.engine.models.sharding.rank_forward import RankForward
from octavo.engine.models.sharding.sharded_layers import own_choices
from octavo.engine.models.vision import split_vision
from octavo.engine.parallel.world import World

log = structlog.get_logger(__name__)


def check_twin(
    model: PreTrainedModel,
    shape: ModelShape,
    source: ModelSource,
    block_size: int,
    world: World | None,
) -> bool:
    """Check the structure of a large model with a small twin, split over the ranks like the model.

    Args:
        model: The large model, or this rank's part of it.
        shape: The large model's dimensions.
        source: The large model's files, and how to read them.
        block_size: Tokens per block.
        world: The ranks that hold the model; all of them call this.

    Returns:
        False if no twin has all kinds of its layers.

    Raises:
        SelfCheckError: The twin's results differ from those of transformers' forward pass.
    """
    divided = world if world is not None and world.size > 1 else None
    try:
        twin = make_twin(model, 1 if divided is None else divided.size)
        split_vision(twin)
        nn.Module.to(twin, source.device)
        replace_attention(twin)
        twin_shape = find_dimensions(twin, source.max_model_len)
        routing = ModuleRouting(twin)
        with attention_of(twin, reference_attention(twin.config)):
            expected = reference(twin, twin_shape, routing)
        if divided is not None:
            source.keep_part_of(twin, divided)
            if source.whole_experts:
                expected = replace(expected, choices=own_choices(twin, expected.choices, divided))
            twin_shape = find_dimensions(twin, source.max_model_len)
            routing = ModuleRouting(twin)
    except Exception as error:  # noqa: BLE001 - transformers raises many types
        log.info("the model has no small twin: it is checked itself", why=first_line(error))
        return False
    if not twin_shape.has_kinds_of(shape):
        log.info("the model has no small twin: it is checked itself", why="other layers")
        return False
    forward: Forward = EagerForward(twin)
    if divided is not None:
        forward = RankForward(forward, divided, twin_shape.vocab_size, everywhere=True)
    absorb_expansions(twin)
    check_in_float32(
        twin,
        forward,
        expected,
        twin_shape,
        source.device,
        block_size=block_size,
        routing=routing,
    )
    return True
