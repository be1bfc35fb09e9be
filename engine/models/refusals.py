"""Refuses models that the engine cannot serve, with a message that says why."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from octavo.common.models.errors import ModelError, UnsupportedModelError, first_line
from octavo.engine.memory.cache_tensors import memory_of
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.checks.self_check import SelfCheckError
from octavo.engine.models.empty_model import make_empty
from octavo.engine.models.linear.plain_linears import (
    already_quantized,
    check_quantizable,
)
from octavo.engine.models.model_source import ModelSource
from octavo.engine.models.quantization import find_scheme
from octavo.engine.models.quantization.formats.base import Format
from octavo.engine.models.weights_size import sizes_by_quantization, why_no_room
from octavo.engine.parallel.place import RankError
from octavo.kernels.ops import check_supported
from octavo.kernels.uncompiled import why_uncompiled


@contextmanager
def as_model_error(path: str) -> Iterator[None]:
    """Convert errors of transformers to a ModelError."""
    try:
        yield
    except (ModelError, RankError):
        raise
    except Exception as error:
        raise ModelError(f"transformers cannot load {path}: {first_line(error)}") from error


@contextmanager
def as_unsupported(path: str) -> Iterator[None]:
    """Convert errors of a model's code to an UnsupportedModelError."""
    try:
        yield
    except SelfCheckError as error:
        raise SelfCheckError(f"{path} cannot be served: {error}") from error
    except (ModelError, RankError):
        raise
    except Exception as error:
        why = why_uncompiled(error)
        if why is None and isinstance(error, (NotImplementedError, ValueError)):
            why = first_line(error)
        raise UnsupportedModelError(
            f"{path} cannot be served: {why}"
            if why is not None
            else f"{path} cannot be served: its code does not run with paged attention"
            f" ({type(error).__name__}: {first_line(error)})"
        ) from error


def check_kernels(
    shape: ModelShape,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Refuse layers that no kernel supports."""
    for layer in set(shape.layers):
        if layer.latent and cache_dtype == torch.int8:
            raise NotImplementedError(
                "--kv-cache-dtype int8 keeps keys and values, and this model caches latents:"
                " use fp8"
            )
        check_supported(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            block_size=block_size,
            dtype=dtype,
            device=device,
            cache_dtype=cache_dtype,
        )


def check_quantization(
    model: PreTrainedModel,
    path: str,
    quantization: str,
    device: torch.device,
    stored_format: Format | None,
) -> None:
    """Refuse a model or device that does not support `quantization`, which is not "none"."""
    if stored_format is not None:
        raise already_quantized(path, stored_format.description, quantization)
    scheme = find_scheme(quantization)
    if device.type == "cpu" and scheme is not None and not scheme.on_cpus:
        raise NotImplementedError(
            f"--quantization {quantization} works on GPUs only: use int8 or int4"
        )
    check_quantizable(model, path, quantization)


def check_room(model: PreTrainedModel, source: ModelSource, quantization: str) -> None:
    """Refuse weights that do not fit into the free memory, before they are read.

    Args:
        model: The model; its weights are not read.
        source: Its files.
        quantization: See `EngineSettings`.

    Raises:
        ModelError: They do not fit; the message names quantizations that would.
    """
    free = memory_of(source.device).available
    if sum(weight.nbytes for weight in {*model.parameters(), *model.buffers()}) <= free:
        return  # packing takes no more
    stored = None if source.checkpoint is None else source.checkpoint.format
    empty = make_empty(source.config, source.dtype)
    if why := why_no_room(sizes_by_quantization(empty, source.device, stored), quantization, free):
        raise ModelError(why)
