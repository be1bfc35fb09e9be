"""Loads a decoder from transformers, with its attention replaced by the paged one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from octavo.common.models.errors import ModelError, first_line
from octavo.engine.attention.interface import PAGED_ATTENTION
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.checks.masks import LONGEST
from octavo.engine.models.checks.probe import LayerAttention, attention_of, probe
from octavo.engine.models.checks.self_check import Reference, SelfCheck, SelfCheckError, reference
from octavo.engine.models.kv_scales import measure_kv_scales
from octavo.engine.models.linear.fuse_linears import join_linears
from octavo.engine.models.linear.plain_linears import check_quantizable, replace_conv1d
from octavo.engine.models.rope import fix_rope
from octavo.engine.models.step import EagerStep, Step
from octavo.engine.settings import KVCacheDtype, Quantization
from octavo.kernels.ops import check_supported

log = structlog.get_logger(__name__)

_FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class UnsupportedModelError(ModelError):
    """The model needs something that the executor does not have."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: with its attention replaced.
        shape: its figures.
        dtype: of its weights.
        cache_dtype: of the KV cache.
        kv_scales: each layer's (key scale, value scale), where that is fp8.
        device: where it is.
        reference: what transformers computes of some tokens.
        check: holds another step of this model to that, and raises a `SelfCheckError`.
    """

    model: PreTrainedModel
    shape: ModelShape
    dtype: torch.dtype
    cache_dtype: torch.dtype
    kv_scales: list[tuple[float, float]] | None
    device: torch.device
    reference: Reference
    check: Callable[[Step], None]


def choose_device(name: str) -> torch.device:
    """Turns `auto`, `cuda` or `cpu` into a device.

    Raises:
        UnsupportedModelError: `cuda` was asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModelError("device cuda was asked for, but torch finds no CUDA device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Turns `auto` or a dtype's name into a dtype.

    `auto` is the checkpoint's own type, but on a CPU float32 where it lacks
    bfloat16 instructions, and bfloat16 in place of float16, which CPUs are
    slow at.
    """
    if name != "auto":
        chosen = getattr(torch, name)
        assert isinstance(chosen, torch.dtype)
        return chosen
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    if device.type == "cpu" and own is not torch.float32:
        # No public way to ask; a wrong guess costs speed alone.
        native = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        return torch.bfloat16 if native else torch.float32
    return own


def load(
    path: str,
    *,
    dtype: str,
    device: str,
    block_size: int,
    quantization: Quantization = "none",
    kv_cache_dtype: KVCacheDtype = "auto",
    max_model_len: int | None = None,
) -> LoadedModel:
    """Loads a hub name's or a directory's model, and checks that it computes what it should.

    Raises:
        SelfCheckError: it does not compute what transformers computes of it.
        UnsupportedModelError: the model is no plain decoder, or the kernels
            do not support its shape; the message says which.
        ModelError: transformers cannot load it.
        OSError: there is no such model.
    """
    where = choose_device(device)
    with _explained(path):
        config = AutoConfig.from_pretrained(path)
        kind = choose_dtype(dtype, config.get_text_config(), where)
    cache_kind = _FP8_DTYPES.get(kv_cache_dtype, kind)
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{path}: encoder-decoder models are not supported")
    with _explained(path):
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=kind,
            attn_implementation=PAGED_ATTENTION,
            device_map=where,
            use_safetensors=True,  # pickled weights can run code
        )
    model.train(mode=False)
    with _refused(path):
        shape = _measure(model, max_model_len)
        check_supported(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=block_size,
            dtype=kind,
            device=where,
            cache_dtype=cache_kind,
        )
        with attention_of(model, "eager"):
            expected = reference(model, shape)
        if where.type == "cpu":
            _prepare_linears(model, shape, path, quantization)
        elif quantization != "none":
            raise NotImplementedError(f"--quantization {quantization} is for CPUs only, so far")
        else:
            join_linears(model)
        kv_scales = (
            None if cache_kind == kind else measure_kv_scales(model, shape, path, cache_kind)
        )
        check = SelfCheck(
            shape,
            kind,
            where,
            block_size=block_size,
            quantization=quantization,
            cache_dtype=cache_kind,
            kv_scales=kv_scales,
        )
        check.run(EagerStep(model), expected)
    return LoadedModel(
        model,
        shape,
        kind,
        cache_kind,
        kv_scales,
        where,
        expected,
        partial(check.run, expected=expected),
    )


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Makes a ModelError of whatever transformers raises."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        why = first_line(error)
        if PAGED_ATTENTION in why:  # from a table of its own
            why = "its classes take no attention implementation but transformers' own"
        raise ModelError(f"transformers cannot load {path}: {why}") from error


@contextmanager
def _refused(path: str) -> Iterator[None]:
    """Make an UnsupportedModelError of whatever a model's code raises as it is tried."""
    try:
        yield
    except SelfCheckError as error:
        raise SelfCheckError(f"{path} cannot be served: {error}") from error
    except ModelError:
        raise
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModelError(f"{path} cannot be served: {first_line(error)}") from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{path} cannot be served: its code does not run with Octavo's attention, which takes"
            f" the place of transformers' own ({type(error).__name__}: {first_line(error)})"
        ) from error


def _prepare_linears(
    model: PreTrainedModel, shape: ModelShape, path: str, quantization: Quantization
) -> None:
    # Not above: these load the kernels for CPU.
    from octavo.engine.models.linear.packed_linear import pack_linears  # noqa: PLC0415
    from octavo.engine.models.quantization.quantize import quantize  # noqa: PLC0415

    replace_conv1d(model)
    if quantization != "none":
        check_quantizable(model, path, quantization)
        quantize(model, shape, path, quantization)
    pack_linears(model)


def _measure(model: PreTrainedModel, max_model_len: int | None) -> ModelShape:
    """Learns a model's figures, by its config and by a run of it.

    Raises:
        NotImplementedError: its attention is of a kind that there is no kernel for.
    """
    config: Any = model.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None)
    if not isinstance(context, int):
        probe(model, LONGEST)  # which may have more to say
        raise NotImplementedError("its config names no max_position_embeddings")
    if getattr(config, "attn_temperature_tuning", None) and hasattr(config, "floor_scale"):
        # Llama 4; within the first `floor_scale` tokens the self-check cannot see it.
        raise NotImplementedError("it scales attention by positions that it counts by itself")
    context = fix_rope(model, context, max_model_len)
    layers = probe(model, context)
    chunks = [layer.mask.chunk for layer in layers if layer.mask.chunk is not None]
    if chunks and min(chunks) < context:
        context = min(chunks)
        log.warning("context cut to the chunks that the model attends in", max_model_len=context)
    heads = {_heads(layer) for layer in layers}
    if len(heads) > 1 or any(layer.key_dim != layer.value_dim for layer in layers):
        unlike = sorted({(*_heads(layer), layer.value_dim) for layer in layers})
        raise NotImplementedError(f"its layers' heads are not all alike: {unlike}")
    num_heads, num_kv_heads, head_dim = heads.pop()
    return ModelShape(
        num_layers=len(layers),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_position=context,
        eos_token_ids=_eos_token_ids(model),
    )


def _heads(layer: LayerAttention) -> tuple[int, int, int]:
    return layer.num_heads, layer.num_kv_heads, layer.key_dim


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """From both configs: a chat model's turn often ends with a token that only one names."""
    config: Any = model.config.get_text_config(decoder=True)
    own = _ids(getattr(model.generation_config, "eos_token_id", None))
    return tuple(sorted({*_ids(getattr(config, "eos_token_id", None)), *own}))


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
