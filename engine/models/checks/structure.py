"""Checks a 16-bit model in float32, where rounding hides no fault of its structure."""

import structlog
import torch
from torch import nn

from octavo.common.models.errors import first_line
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.checks.reference import Reference
from octavo.engine.models.checks.routing import Routing
from octavo.engine.models.checks.self_check import SelfCheck, SelfCheckError
from octavo.engine.models.checks.widened import widened
from octavo.engine.models.forward import Forward
from octavo.engine.models.sharding.rank_forward import RankForward

log = structlog.get_logger(__name__)


def check_in_float32(
    model: nn.Module,
    forward: Forward,
    expected: Reference,
    shape: ModelShape,
    device: torch.device,
    *,
    block_size: int,
    routing: Routing,
) -> None:
    """Check a model with Octavo's attention and its own weights, before they are packed.

    Args:
        model: The model, or this rank's part of it.
        forward: The step, which runs on all ranks.
        expected: The results of transformers' forward pass.
        shape: The model's dimensions.
        device: The model's device.
        block_size: Tokens per block.
        routing: The routing of its expert layers.

    Raises:
        SelfCheckError: The results differ.
    """
    check = SelfCheck(
        expected, shape, torch.float32, device, block_size=block_size, routing=routing
    )
    try:
        with widened(model):
            check(forward)
    except SelfCheckError:
        raise
    except Exception as error:
        # No rank may continue without the others.
        if device.type == "cpu" or isinstance(forward, RankForward):
            raise
        # A GPU with room for the model in 16 bits may lack room for float32.
        log.warning("the model is not checked in float32", error=first_line(error))
