"""Runs a single step on one prompt."""

import torch

from octavo.engine.attention.operator import attending
from octavo.engine.models.quantization.calibration import step_alone


def logits(step, shape, inputs):
    """Run a step in bfloat16; `inputs` are all tokens, positions and logit rows of a prompt."""
    alone = step_alone(shape, inputs[0].shape[1], torch.bfloat16, torch.device("cpu"))
    with torch.inference_mode(), attending(alone):
        return step(*(x.clone() for x in inputs))  # created here, as in an engine
