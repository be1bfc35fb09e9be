"""Loads a decoder from transformers, with its attention replaced by the paged one."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.executor.attention import PAGED_ATTENTION
from kernels.ops import check_supported


class UnsupportedModelError(ValueError):
    """The model needs something that the executor does not have."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The figures of a model that memory and validation go by."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that a block of `block_size` tokens takes, all layers, K and V."""
        per_token = self.num_layers * 2 * self.num_kv_heads * self.head_dim
        return per_token * block_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    model: PreTrainedModel
    shape: ModelShape
    dtype: torch.dtype
    device: torch.device


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


def load(path: str, *, dtype: str, device: str, block_size: int) -> LoadedModel:
    """Loads a hub name's or a directory's model.

    Raises:
        UnsupportedModelError: the model is no plain decoder, or the kernels
            do not support its shape; the message says which.
        OSError: there is no such model.
    """
    where = choose_device(device)
    config = AutoConfig.from_pretrained(path)
    kind = choose_dtype(dtype, config.get_text_config(), where)
    shape = _shape(config)
    try:
        check_supported(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=block_size,
            dtype=kind,
            device=where,
        )
    except ValueError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    model = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=kind, attn_implementation=PAGED_ATTENTION, device_map=where
    )
    model.train(mode=False)
    return LoadedModel(model, _with_eos(shape, model), kind, where)


def _shape(config: PreTrainedConfig) -> ModelShape:
    text: Any = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise UnsupportedModelError("encoder-decoder models are not supported")
    heads = text.num_attention_heads
    return ModelShape(
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        max_position=text.max_position_embeddings,
        eos_token_ids=_ids(text.eos_token_id),
    )


def _with_eos(shape: ModelShape, model: PreTrainedModel) -> ModelShape:
    """Adds the generation config's end-of-sequence tokens, which chat models often have."""
    own = _ids(getattr(model.generation_config, "eos_token_id", None))
    return replace(shape, eos_token_ids=tuple(sorted({*shape.eos_token_ids, *own})))


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
