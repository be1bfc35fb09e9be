"""Reports from its config whether an embedding model or a classifier fits into memory."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from octavo.common.models.classification import ClassifierPlan
from octavo.common.models.embedding import EmbeddingPlan
from octavo.engine.embedding.load import load_empty_encoder, loading_bytes
from octavo.engine.memory.cache_tensors import memory_of
from octavo.engine.models.weights_size import sizes_by_quantization, why_no_room
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.capacity import StartupError


@dataclass(frozen=True, slots=True)
class EmbedderReport:
    """The memory that an embedding model or a classifier needs. Sizes are in bytes.

    Attributes:
        model: The model's name, as given.
        model_type: Its type in transformers.
        architecture: Its class.
        device: The device that would run it.
        dtype: The dtype of its weights.
        quantization: The scheme of its linear layers.
        parameters: The number of its weights.
        weights: Estimated bytes of its weights.
        weights_by_quantization: The same for each quantization that the device supports.
        loading: Bytes that it takes while it loads.
        memory: Free bytes of memory before the model is loaded.
        max_model_len: Maximum tokens of a text.
        pooling: How a text's hidden states become one.
        dimensions: Elements of an embedding; None for classifiers.
        labels: Names of the classes; none for embeddings.
    """

    model: str
    model_type: str
    architecture: str
    device: str
    dtype: str
    quantization: str
    parameters: int
    weights: int
    weights_by_quantization: dict[str, int]
    loading: int
    memory: int
    max_model_len: int
    pooling: str
    dimensions: int | None
    labels: tuple[str, ...]


def report_embedder(
    settings: EngineSettings,
    directory: Path,
    plan: EmbeddingPlan | ClassifierPlan,
    memory: int | None,
) -> EmbedderReport:
    """Return a report of a model's memory needs; see `model_report.report`."""
    model, encoder, dtype = load_empty_encoder(settings, directory, plan)
    device = torch.device("cpu")
    parameters = sum(weight.numel() for weight in model.parameters())
    nn.Module.to(model, dtype)  # the model's own method is untyped
    weights = sizes_by_quantization(model, device, None)
    free = memory_of(device).available if memory is None else memory
    if why := why_no_room(weights, settings.quantization, free):
        raise StartupError(why)
    classifies = isinstance(plan, ClassifierPlan)
    return EmbedderReport(
        model=settings.model,
        model_type=model.config.model_type,
        architecture=type(model).__name__,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        quantization=settings.quantization,
        parameters=parameters,
        weights=weights[settings.quantization],
        weights_by_quantization=weights,
        loading=loading_bytes(parameters, model.config, dtype),
        memory=free,
        max_model_len=encoder.max_tokens,
        pooling=encoder.pooling,
        dimensions=None if classifies else encoder.dimensions,
        labels=plan.labels if isinstance(plan, ClassifierPlan) else (),
    )
