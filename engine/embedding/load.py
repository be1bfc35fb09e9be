"""Loads an embedding model or a classifier from transformers, and checks that it computes the same.

The check (`self_check.py`) compares with transformers' own eager pass in float32: first in float32,
where rounding hides no fault of the structure, then as the model is served. Weights in 16 bits are
widened for it when they are used.
"""

import inspect
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto as auto

from octavo.common.models.classification import ClassifierPlan
from octavo.common.models.embedding import EmbeddingPlan, Pooling
from octavo.common.models.errors import ModelError, UnsupportedModelError, first_line
from octavo.common.models.json_files import CONFIG, read_json
from octavo.engine.attention.ragged import RAGGED_ATTENTION, attending_within
from octavo.engine.compilation.fusion import fuse
from octavo.engine.compilation.script import Script
from octavo.engine.compilation.trace import trace
from octavo.engine.embedding.dense import read_dense
from octavo.engine.embedding.encoder import EagerForward, Encoder
from octavo.engine.embedding.head import AnswerHead, ClassificationHead
from octavo.engine.embedding.self_check import (
    MAX_WINDOW,
    check_logits,
    compare_hidden,
    eager_hidden,
    eager_logits,
    random_texts,
    window_of,
)
from octavo.engine.memory.cache_tensors import GIB, memory_of
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.checks.reference import row_errors
from octavo.engine.models.checks.self_check import (
    FLOAT32_TOLERANCE,
    ROUNDING_FACTOR,
    SIXTEEN_BIT_TOLERANCE,
)
from octavo.engine.models.checks.weight_names import check_loading
from octavo.engine.models.checks.widened import widened
from octavo.engine.models.device import choose_device
from octavo.engine.models.dimensions import fix_context
from octavo.engine.models.dtypes import checkpoint_dtype, choose_dtype
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


def load_encoder(
    settings: EngineSettings, path: Path, plan: EmbeddingPlan | ClassifierPlan
) -> LoadedEncoder:
    """Load the model, and check it.

    Args:
        settings: The engine's settings.
        path: The model's directory.
        plan: What it makes of texts.

    Raises:
        UnsupportedModelError: The engine cannot serve the model with these settings.
        ModelError: The model cannot be read.
    """
    _check_settings(settings, str(path))
    with as_model_error(str(path)):
        config = read_config(str(path), quantized=False)
        dtype = _dtype(settings, config)
        model = _read(str(path), config, plan, dtype)
    model.train(mode=False)
    with as_unsupported(str(path)), torch.inference_mode():
        encoder = _make_encoder(model.base_model, plan, settings.max_model_len)
        vocab_size = config.get_text_config().vocab_size
        encoder = _checked(encoder, model, settings, str(path), dtype)
        return LoadedEncoder(encoder, dtype, vocab_size)


def load_empty_encoder(
    settings: EngineSettings, path: Path, plan: EmbeddingPlan | ClassifierPlan
) -> tuple[PreTrainedModel, Encoder, torch.dtype]:
    """Create a model without weights, after the checks that need none.

    Returns:
        The model, its encoder, and the dtype to serve it in.

    Raises:
        UnsupportedModelError: See `load_encoder`.
        ModelError: See `load_encoder`.
    """
    _check_settings(settings, str(path))
    with as_model_error(str(path)):
        config = read_config(str(path), quantized=False)
        empty = _make_empty(str(path), config, plan)
    with as_unsupported(str(path)):
        encoder = _make_encoder(empty.base_model, plan, settings.max_model_len)
    return empty, encoder, _dtype(settings, config)


def _dtype(settings: EngineSettings, config: Any) -> torch.dtype:  # noqa: ANN401 - no common class
    name = settings.dtype
    if settings.quantization != "none" and name == "auto":
        name = "bfloat16"  # which the kernels of quantized weights take
    return choose_dtype(name, config, torch.device("cpu"))


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
        ("--tensor-parallel-size and --pipeline-parallel-size", settings.ranks > 1),
        ("--lora and --enable-lora", settings.takes_adapters),
        ("--speculation", settings.speculation != "off"),
    ):
        if given:
            raise UnsupportedModelError(f"{path} embeds texts: {flag} does not apply to it")


def _make_empty(path: str, config: Any, plan: EmbeddingPlan | ClassifierPlan) -> PreTrainedModel:  # noqa: ANN401
    """Create a model without weights, with the head that its plan needs.

    Raises:
        UnsupportedModelError: It is no encoder or decoder, or is quantized.
    """
    known, auto_class = _classes(plan)
    if config.model_type not in known or config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{path} ({config.model_type}) is neither an encoder nor a decoder, and cannot"
            f" {'embed' if isinstance(plan, EmbeddingPlan) else 'classify'}"
        )
    if open_checkpoint(path) is not None:
        raise UnsupportedModelError(
            f"{path} is quantized, and Octavo embeds with unquantized weights: use such a version"
            " of the model, and perhaps --quantization"
        )
    with torch.device("meta"):
        empty: PreTrainedModel = auto_class.from_config(config, trust_remote_code=False)
    return empty


def loading_bytes(parameters: int, config: PreTrainedConfig, served: torch.dtype) -> int:
    """Return the memory of a model's weights while it loads: as they are read, or served."""
    return parameters * max(checkpoint_dtype(config).itemsize, served.itemsize)


def _read(
    path: str,
    config: Any,  # noqa: ANN401
    plan: EmbeddingPlan | ClassifierPlan,
    served: torch.dtype,
) -> PreTrainedModel:
    """Read a model in its checkpoint's dtype.

    Raises:
        UnsupportedModelError: See `_make_empty`.
        ModelError: Its weights are incomplete, or do not fit into memory, read or served.
    """
    empty: Any = _make_empty(path, config, plan)
    needed = loading_bytes(sum(map(torch.Tensor.numel, empty.parameters())), config, served)
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
        dtype=checkpoint_dtype(config),
        attn_implementation="eager",
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **options,
    )
    check_loading(path, *loaded)
    return loaded[0]


def _classes(plan: EmbeddingPlan | ClassifierPlan) -> tuple[Collection[str], Any]:
    """Return the model types that transformers has for a plan, and the class that makes them."""
    if isinstance(plan, EmbeddingPlan):
        return KINDS, AutoModel
    if plan.answers is not None:
        return auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM
    known = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    return known, AutoModelForSequenceClassification


def _make_encoder(
    model: Any,  # noqa: ANN401 - a model's base has no type
    plan: EmbeddingPlan | ClassifierPlan,
    max_model_len: int | None,
) -> Encoder:
    """Return a model's encoder, with the limit of its texts; a classifier's has no head yet.

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
    window = window_of(config)
    limits = [context - first, plan.max_tokens, window if window and window > MAX_WINDOW else None]
    most = min(limit for limit in limits if limit is not None)
    if max_model_len is not None and max_model_len > most:
        raise NotImplementedError(f"--max-model-len is {max_model_len}, and its texts have {most}")
    head, size, segments = nn.Sequential(), config.hidden_size, None
    if isinstance(plan, EmbeddingPlan):
        pooling = plan.pooling
        for folder in plan.dense:
            head.append(read_dense(folder, size))
            size = read_json(folder / CONFIG)["out_features"]
    else:
        pooling, size = _classifier_pooling(config, plan), len(plan.labels)
        tells = "token_type_ids" in inspect.signature(model.forward).parameters
        if tells and getattr(config, "type_vocab_size", 0) > 1:
            segments = config.vocab_size
    step = EagerForward(model, segments)
    longest = max_model_len or most
    return Encoder(step, plan, pooling, head, size, longest, first, segments)


def _classifier_pooling(config: Any, plan: ClassifierPlan) -> Pooling:  # noqa: ANN401
    """Return whose hidden state a head takes: the first token's, but the last one's in decoders."""
    decodes = config.model_type not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if decodes or plan.answers is not None:
        return "last"
    pooling: Pooling = getattr(config, "classifier_pooling", "cls")
    return pooling


def _checked(
    encoder: Encoder,
    model: PreTrainedModel,
    settings: EngineSettings,
    path: str,
    dtype: torch.dtype,
) -> Encoder:
    """Return an encoder as it is served: checked, rounded, quantized, packed and traced.

    Args:
        encoder: The encoder; a classifier's without its head.
        model: Its model as it was read, with transformers' own attention; changed in place. It has
            a classifier's head.
        settings: The engine's settings.
        path: The model's directory.
        dtype: The dtype to serve it in.

    Raises:
        NotImplementedError: Its attention cannot be replaced.
        SelfCheckError: It does not compute what transformers computes.
    """
    began = time.perf_counter()
    vocab_size = model.config.get_text_config().vocab_size
    texts = random_texts(encoder, model.config.get_text_config())
    classifier: Any = model
    model, plan, logits = classifier.base_model, encoder.plan, None
    if not model._can_set_attn_implementation():  # noqa: SLF001 - no public name
        raise NotImplementedError("it does not call transformers' attention interface")
    with widened(classifier):
        expected = eager_hidden(encoder, model, texts)
        if isinstance(plan, ClassifierPlan):
            logits = eager_logits(encoder, classifier, texts, plan.answers)
    if isinstance(plan, ClassifierPlan):
        head = plan.answers and AnswerHead(classifier, plan.answers)
        encoder = replace(encoder, head=head or ClassificationHead(classifier))
        nn.Module.to(encoder.head, torch.float32)
    model.set_attn_implementation(RAGGED_ATTENTION)
    with widened(model):
        if logits is not None:
            check_logits(encoder.embed(texts), logits)
        structure = compare_hidden(encoder, texts, expected, FLOAT32_TOLERANCE, "in float32")
    limit = FLOAT32_TOLERANCE
    if model.dtype != dtype:
        nn.Module.to(model, dtype)  # the model's own method is untyped
    if dtype != torch.float32:
        model.set_attn_implementation("eager")
        own = row_errors(eager_hidden(encoder, model, texts), expected).max()
        model.set_attn_implementation(RAGGED_ATTENTION)
        limit = max(SIXTEEN_BIT_TOLERANCE, ROUNDING_FACTOR * float(own))
    scheme = find_scheme(settings.quantization)
    with attending_within(torch.tensor([0, 1], dtype=torch.int32)):  # one token shows the layers
        if scheme is not None:
            check_quantizable(model, path, settings.quantization)
            shape = ModelShape((), vocab_size, encoder.max_tokens, ())
            tokens = calibration_tokens(path, shape).numpy().astype(np.uint32)
            scheme.quantize(model, partial(encoder.run, [tokens]), _unquantized(model))
            limit = max(limit, scheme.tolerance)
        pack_linears(model)
    huge_pages.gather([*model.parameters(), *model.buffers()])
    if settings.compile != "off" and device_warning(torch.device("cpu")) is None:
        encoder = _traced(encoder, vocab_size)
    served = compare_hidden(encoder, texts, expected, limit, "as it is served")
    log.info(
        "self-check passed",
        seconds=round(time.perf_counter() - began, 3),
        dtype=str(dtype).removeprefix("torch."),
        structure=float(f"{structure:.2g}"),
        served=float(f"{served:.2g}"),
    )
    return encoder


def _unquantized(model: PreTrainedModel) -> Callable[[nn.Linear], bool]:
    """Return a function that tells which of a model's linear layers are not quantized.

    Those of the first quarter of transformer layers, as all later layers pass on their errors; and
    those with more inputs than outputs, as most lead back from an MLP and have a few large inputs,
    so that rounding hurts the others. For MiniLM in int8, the lowest cosine with float32 of 1,000
    texts is 0.9991 with both rules, 0.9983 without the first, and 0.994 without both; it is 0.9989
    if the first and the last layer are kept.
    """
    count = model.config.get_text_config().num_hidden_layers
    lists = (each for each in model.modules() if isinstance(each, nn.ModuleList))
    layers = next((each for each in lists if len(each) == count), nn.ModuleList())
    kept = {linear for layer in layers[: -(-count // 4)] for linear in layer.modules()}
    return lambda linear: linear in kept or linear.in_features > linear.out_features


def _traced(encoder: Encoder, vocab_size: int) -> Encoder:
    """Return an encoder that runs without Python's lock; the same after a warning if it cannot."""
    assert isinstance(encoder.forward, EagerForward)
    try:
        with torch.inference_mode(False):  # whose operators would be composite ones
            traced = trace(encoder.forward, vocab_size)
        fuse(traced.graph)
        return replace(encoder, forward=Script(traced))
    except Exception as error:  # noqa: BLE001 - PyTorch raises many types
        log.warning("the model runs in Python, which is slower", why=first_line(error))
        return encoder
