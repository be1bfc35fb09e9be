"""Logs which share of the quantized weights runs as stored."""

import structlog
from transformers import PreTrainedModel

from octavo.engine.models.deferred import DeferredTensor
from octavo.engine.models.experts.expert_layer import expert_modules
from octavo.engine.models.quantization.formats.stored_experts import are_stored
from octavo.engine.models.read_weights import QuantizedCheckpoint

log = structlog.get_logger(__name__)


def log_widened(model: PreTrainedModel, checkpoint: QuantizedCheckpoint, packed: int) -> None:
    """Log the share of quantized weights that run as stored, and the memory of dequantized ones.

    Args:
        model: The model, or this process's part of it, once packed.
        checkpoint: The checkpoint.
        packed: The number of weights that run as stored.
    """
    widened = sum(
        weight.numel()
        for weight in model.parameters()
        if isinstance(weight, DeferredTensor) and weight.stored is not None
    )
    for path, module in expert_modules(model).items():
        if are_stored(checkpoint, path):
            widened += sum(weight.numel() for weight in module.parameters() if weight.dim() == 3)
    log.info(
        "quantized weights",
        format=checkpoint.format.description,
        as_stored_percent=round(100 * packed / max(1, packed + widened)),
        widened_to=str(model.dtype).removeprefix("torch.") if widened else None,
        widened_gib=round(widened * model.dtype.itemsize / (1 << 30), 3),
    )
