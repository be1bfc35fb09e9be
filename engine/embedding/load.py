"""Loads an embedding model from transformers, and checks that it computes the same.

The check compares the hidden states of random tokens with those of transformers' own eager pass in
float32: first in float32, where rounding hides no fault of the structure, then as it is served.
"""

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from octavo.common.models.embedding import EmbeddingPlan
from octavo.common.models.errors import ModelError, UnsupportedModelError, first_line
from octavo.common.models.json_files import CONFIG, read_json
from octavo.engine.attention.ragged import RAGGED_ATTENTION, attending_within
from octavo.engine.compilation.fusion import fuse
from octavo.engine.compilation.script import Script
from octavo.engine.compilation.trace import trace
from octavo.engine.embedding.dense import read_dense
from octavo.engine.embedding.encoder import EagerForward, Encoder, Text
from octavo.engine.memory.cache_tensors import GIB, memory_of
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.checks.reference import row_errors
from octavo.engine.models.checks.self_check import (
    FLOAT32_TOLERANCE,
    ROUNDING_FACTOR,
    SIXTEEN_BIT_TOLERANCE,
    SelfCheckError,
)
from octavo.engine.models.checks.weight_names import check_loading
from octavo.engine.models.device import choose_device
from octavo.engine.models.dimensions import fix_context
from octavo.engine.models.dtypes import choose_dtype
from octavo.engine.models.linear.packed_linear import pack_linears
from octavo.engine.models.linear.plain_linears import check_quantizable
from octavo.engine.models.quantization import find_scheme
from octavo.engine.models.quantization.calibration import calibration_tokens
from octavo.engine.models.read_weights import open_checkpoint, read_config
from octavo.engine.models.refusals import as_model_error, as_unsupported
from octavo.engine.settings import EngineSettings
from octavo.kernels import huge_pages
from octavo.kernels.ops import device_warning

log = structlog.get_logger(__name__)

KINDS = (
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    | auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES
    | auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
)
"""Model types of encoders and decoders, by transformers' tables."""
LENGTHS = (40, 1, 17, 5)
"""Tokens of the texts of the check."""
BEYOND = 40
"""Tokens by which its last text exceeds a window."""
MAX_WINDOW = 1024
"""Maximum window that a text of the check exceeds. Models with a larger one get no longer texts."""


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An embedding model ready to run.

    Attributes:
        encoder: The model.
        dtype: Dtype of its weights.
        vocab_size: Exclusive upper limit of token ids.
    """

    encoder: Encoder
    dtype: torch.dtype
    vocab_size: int


def load_encoder(settings: EngineSettings, path: Path, plan: EmbeddingPlan) -> LoadedEncoder:
    """Load the model, and check it.

    Args:
        settings: The engine's settings.
        path: The model's directory.
        plan: How it embeds.

    Raises:
        UnsupportedModelError: The engine cannot serve the model with these settings.
        ModelError: The model cannot be read.
    """
    _check_settings(settings, str(path))
    with as_model_error(str(path)):
        config = read_config(str(path), quantized=False)
        model = _read(str(path), config)
    model.train(mode=False)
    name = settings.dtype
    if settings.quantization != "none" and name == "auto":
        name = "bfloat16"  # which the kernels of quantized weights take
    dtype = choose_dtype(name, config, torch.device("cpu"))
    with as_unsupported(str(path)), torch.inference_mode():
        encoder = _make_encoder(model, plan, settings.max_model_len)
        vocab_size = config.get_text_config().vocab_size
        encoder = _checked(encoder, model, settings, str(path), dtype)
        return LoadedEncoder(encoder, dtype, vocab_size)


def _check_settings(settings: EngineSettings, path: str) -> None:
    """Refuse settings that do not apply to embedding models.

    Raises:
        UnsupportedModelError: The message names the setting.
    """
    if choose_device(settings.device).type != "cpu":
        raise UnsupportedModelError(
            f"{path} embeds texts, which Octavo does on CPUs only yet: set --device cpu"
        )
    for flag, given in (
        ("--tensor-parallel-size", settings.tensor_parallel_size > 1),
        ("--lora and --enable-lora", settings.takes_adapters),
        ("--speculation", settings.speculation != "off"),
    ):
        if given:
            raise UnsupportedModelError(f"{path} embeds texts: {flag} does not apply to it")


def _read(path: str, config: Any) -> PreTrainedModel:  # noqa: ANN401 - no common class
    """Read a model in float32.

    Raises:
        UnsupportedModelError: It is no encoder or decoder, or is quantized.
        ModelError: Its weights are incomplete, or do not fit into memory.
    """
    if config.model_type not in KINDS or config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{path} ({config.model_type}) is neither an encoder nor a decoder, and cannot embed"
        )
    if open_checkpoint(path) is not None:
        raise UnsupportedModelError(
            f"{path} is quantized, and Octavo embeds with unquantized weights: use such a version"
            " of the model, and perhaps --quantization"
        )
    with torch.device("meta"):
        empty: Any = AutoModel.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    needed = sum(weight.numel() for weight in empty.parameters()) * torch.float32.itemsize
    free = memory_of(torch.device("cpu")).available
    if needed > free:
        raise ModelError(
            f"{path} needs {needed / GIB:.1f} GiB of memory while it loads, and {free / GIB:.1f}"
            " GiB are free"
        )
    options: dict[str, Any] = {}
    if "add_pooling_layer" in inspect.signature(type(empty).__init__).parameters:
        options["add_pooling_layer"] = False
    loaded: tuple[PreTrainedModel, dict[str, Any]] = type(empty).from_pretrained(
        path,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **options,
    )
    check_loading(path, *loaded)
    return loaded[0]


def _make_encoder(
    model: PreTrainedModel, plan: EmbeddingPlan, max_model_len: int | None
) -> Encoder:
    """Return a model's encoder, with the limit of its texts.

    Raises:
        NotImplementedError: It has no limit, or a lower one than the setting.
    """
    config: Any = model.config.get_text_config()
    context = fix_context(model, max_model_len)
    if context is None:
        raise NotImplementedError("its config has no max_position_embeddings")
    tables = [
        table for name, table in model.named_modules() if name.endswith("position_embeddings")
    ]
    padding = next((getattr(table, "padding_idx", None) for table in tables), None)
    first = 0 if padding is None else padding + 1
    window = _window(config)
    limits = [context - first, plan.max_tokens, window if window and window > MAX_WINDOW else None]
    most = min(limit for limit in limits if limit is not None)
    if max_model_len is not None and max_model_len > most:
        raise NotImplementedError(f"--max-model-len is {max_model_len}, and its texts have {most}")
    dense, size = nn.Sequential(), config.hidden_size
    for folder in plan.dense:
        dense.append(read_dense(folder, size))
        size = read_json(folder / CONFIG)["out_features"]
    return Encoder(EagerForward(model), plan, size, max_model_len or most, first, dense)


def _window(config: Any) -> int | None:  # noqa: ANN401 - no declared field
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) else None


def _checked(
    encoder: Encoder,
    model: PreTrainedModel,
    settings: EngineSettings,
    path: str,
    dtype: torch.dtype,
) -> Encoder:
    """Return an encoder as it is served: checked, rounded, quantized, packed and traced.

    Args:
        encoder: The encoder.
        model: Its model in float32, with transformers' own attention; changed in place.
        settings: The engine's settings.
        path: The model's directory.
        dtype: The dtype to serve it in.

    Raises:
        NotImplementedError: Its attention cannot be replaced.
        SelfCheckError: It does not compute what transformers computes.
    """
    began = time.perf_counter()
    vocab_size = model.config.get_text_config().vocab_size
    texts = _texts(encoder, model.config.get_text_config())
    if not model._can_set_attn_implementation():  # noqa: SLF001 - no public name
        raise NotImplementedError("it does not call transformers' attention interface")
    expected = _eager(model, texts)
    model.set_attn_implementation(RAGGED_ATTENTION)
    structure = _compare(encoder, texts, expected, FLOAT32_TOLERANCE, "in float32")
    limit = FLOAT32_TOLERANCE
    if dtype != torch.float32:
        nn.Module.to(model, dtype)  # the model's own method is untyped
        model.set_attn_implementation("eager")
        own = row_errors(_eager(model, texts), expected).max()
        model.set_attn_implementation(RAGGED_ATTENTION)
        limit = max(SIXTEEN_BIT_TOLERANCE, ROUNDING_FACTOR * float(own))
    scheme = find_scheme(settings.quantization)
    with attending_within(torch.tensor([0, 1], dtype=torch.int32)):  # one token shows the layers
        if scheme is not None:
            check_quantizable(model, path, settings.quantization)
            shape = ModelShape((), vocab_size, encoder.max_tokens, ())
            tokens = calibration_tokens(path, shape).numpy().astype(np.uint32)
            scheme.quantize(model, partial(encoder.run, [tokens]), _narrows)
            limit = max(limit, scheme.tolerance)
        pack_linears(model)
    huge_pages.gather([*model.parameters(), *model.buffers()])
    if settings.compile != "off" and device_warning(torch.device("cpu")) is None:
        encoder = _traced(encoder, vocab_size)
    served = _compare(encoder, texts, expected, limit, "as it is served")
    log.info(
        "self-check passed",
        seconds=round(time.perf_counter() - began, 3),
        dtype=str(dtype).removeprefix("torch."),
        structure=float(f"{structure:.2g}"),
        served=float(f"{served:.2g}"),
    )
    return encoder


def _narrows(layer: nn.Linear) -> bool:
    """Return whether a layer has more inputs than outputs, and so is not quantized.

    Most such layers lead back from an MLP. Their inputs have a few large elements, so that rounding
    hurts the others: for MiniLM in int8, the mean cosine with float32 is 0.9993 without these
    layers and 0.9979 with them.
    """
    return layer.in_features > layer.out_features


def _traced(encoder: Encoder, vocab_size: int) -> Encoder:
    """Return an encoder that runs without Python's lock; the same after a warning if it cannot."""
    assert isinstance(encoder.forward, EagerForward)
    try:
        traced = trace(encoder.forward, vocab_size)
        fuse(traced.graph)
        return replace(encoder, forward=Script(traced))
    except Exception as error:  # noqa: BLE001 - PyTorch raises many types
        log.warning("the model runs in Python, which is slower", why=first_line(error))
        return encoder


def _texts(encoder: Encoder, config: Any) -> list[Text]:  # noqa: ANN401 - no declared fields
    """Return random texts for the check: some short ones, and one longer than a window."""
    window = _window(config) or 0
    lengths = [*LENGTHS, min(window, MAX_WINDOW) + BEYOND]
    generator = np.random.default_rng(0)
    allowed = np.arange(config.vocab_size, dtype=np.uint32)
    allowed = allowed[allowed != getattr(config, "pad_token_id", None)]
    return [generator.choice(allowed, min(n, encoder.max_tokens)) for n in lengths]


def _eager(model: PreTrainedModel, texts: Sequence[Text]) -> Tensor:
    """Return the hidden states of transformers' own pass, text by text, in float32."""
    rows = []
    for text in texts:
        ids = torch.from_numpy(text.astype(np.int64))[None]
        output: Any = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        rows.append(output.last_hidden_state[0].float())
    return torch.cat(rows)


def _compare(
    encoder: Encoder, texts: Sequence[Text], expected: Tensor, limit: float, how: str
) -> float:
    """Return the maximum error of hidden states: of the texts together, and of one alone.

    Raises:
        SelfCheckError: It is above the limit.
    """
    together, _ = encoder.run(texts)
    alone, _ = encoder.run(texts[-1:])
    rows = len(alone)
    errors = row_errors(
        torch.cat([together, alone]).float(), torch.cat([expected, expected[-rows:]])
    )
    error = float(errors.max())
    if not error <= limit:  # also for NaN
        raise SelfCheckError(
            f"self-check failed: {how}, the hidden states of random texts differ from those of"
            f" transformers' forward pass by {error:.1%} of their standard deviation, and the limit"
            f" is {limit:.1%}"
        )
    return error
