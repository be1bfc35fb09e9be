"""Loads a decoder from transformers, with its attention replaced by paged attention."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.common.models.errors import ModelError, UnsupportedModelError, first_line
from octavo.engine.attention.latent import absorb_expansions, absorbed_linears
from octavo.engine.memory.cache_tensors import memory_of
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.attention_layers import reference_attention, replace_attention
from octavo.engine.models.checks.masks import MAX_POSITIONS
from octavo.engine.models.checks.module_routing import ModuleRouting
from octavo.engine.models.checks.probe import attention_of, probe, set_attention
from octavo.engine.models.checks.reference import Reference, reference, with_rounding
from octavo.engine.models.checks.remembered import place_of, recall, remember
from octavo.engine.models.checks.routing import Routing
from octavo.engine.models.checks.self_check import SelfCheck, SelfCheckError
from octavo.engine.models.checks.structure import check_in_float32
from octavo.engine.models.checks.trial_adapter import TrialReference, trial_reference
from octavo.engine.models.checks.twin import make_twin
from octavo.engine.models.checks.widened import is_small
from octavo.engine.models.deferred import held, hold
from octavo.engine.models.device import choose_device
from octavo.engine.models.empty_model import make_empty, running_empty
from octavo.engine.models.experts.grouped_experts import group_experts
from octavo.engine.models.forward import EagerForward, Forward
from octavo.engine.models.kv_scales import measure_kv_scales
from octavo.engine.models.linear.fuse_linears import fuse_linears
from octavo.engine.models.linear.plain_linears import (
    already_quantized,
    check_quantizable,
    replace_conv1d,
)
from octavo.engine.models.quantization import find_scheme
from octavo.engine.models.quantization.base import Scheme
from octavo.engine.models.quantization.checkpoints import find_format
from octavo.engine.models.quantization.checkpoints.base import Format
from octavo.engine.models.quantization.checkpoints.reader import (
    QuantizedCheckpoint,
    load_weights,
    open_checkpoint,
    read_config,
)
from octavo.engine.models.quantization.on_gpu import pack_checkpoint_on_gpu
from octavo.engine.models.rope import fix_rope
from octavo.engine.models.sharding.plan import check_splittable, make_plan
from octavo.engine.models.sharding.rank_forward import RankForward
from octavo.engine.models.sharding.whole_reference import whole_reference
from octavo.engine.models.weights_size import sizes_by_quantization, why_no_room
from octavo.engine.parallel.world import World
from octavo.kernels.gpu import e4m3_dtype
from octavo.kernels.ops import check_supported

CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length")
"""Names of the context's length in configs."""
DEFAULT_CONTEXTS = {"bloom": 2048}
"""Contexts by model type, of models whose configs may lack it. Bloom was trained with 2,048
tokens (Le Scao et al. 2022, table 3)."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: The model, with its attention replaced.
        shape: Its dimensions.
        dtype: Type of its weights.
        cache_dtype: Type of the KV cache.
        kv_scales: Each layer's (key scale, value scale) of an fp8 KV cache; else None.
        device: The model's device.
        check: The self-check of its steps.
        trial: The self-check with an adapter, if one was asked for; no step has passed it yet.
        kept: The file of the results that the self-check compares with, if any; see `pass_check`.
        variant: Further properties that the outcome of the check depends on.
    """

    model: PreTrainedModel
    shape: ModelShape
    dtype: torch.dtype
    cache_dtype: torch.dtype
    kv_scales: list[tuple[float, float]] | None
    device: torch.device
    check: SelfCheck
    trial: "TrialCheck | None" = None
    kept: Path | None = None
    variant: str = ""

    def pass_check(self, forward: Forward, routing: Routing | None = None) -> None:
        """Check a step, and remember its reference.

        Args:
            forward: Computes the model.
            routing: Forces experts on it, if not the model's own modules.

        Raises:
            SelfCheckError: It does not pass; nothing is remembered then.
        """
        check = self.check if routing is None else self.check.routed(routing)
        variant = f"{self.variant} {type(forward).__name__}"
        known = variant in check.expected.passed
        try:
            check(forward, known=known)
        except SelfCheckError:
            if self.kept is not None:
                self.kept.unlink(missing_ok=True)
            raise
        if self.kept is not None and not known:
            remember(self.kept, replace(check.expected, passed=(*check.expected.passed, variant)))


@dataclass(frozen=True, slots=True)
class TrialCheck:
    """The self-check with an adapter.

    Attributes:
        check: The check against transformers' results with the adapter.
        scales: Scales by the name of each layer that it adapts.
    """

    check: SelfCheck
    scales: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EmptyModel:
    """A model without its weights.

    Attributes:
        model: The model; see `empty_model.py`.
        shape: See `LoadedModel`.
        dtype: See `LoadedModel`.
        cache_dtype: See `LoadedModel`.
        device: The device that it would run on.
        stored: The format of its checkpoint, if its weights are quantized.
    """

    model: PreTrainedModel
    shape: ModelShape
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    stored: Format | None = None


def choose_dtype(name: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that `auto` or a dtype's name stands for.

    `auto` is the checkpoint's dtype, except on a CPU: there it is bfloat16 in place of float16,
    which CPUs are slow at. Without Octavo's kernels for linear layers it is float32 there if the
    CPU lacks AVX-512: PyTorch is slow at bfloat16 then.
    """
    if name != "auto":
        chosen = getattr(torch, name)
        assert isinstance(chosen, torch.dtype)
        return chosen
    config_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    if device.type == "cpu" and config_dtype is not torch.float32:
        from octavo.kernels.cpu import linear  # noqa: PLC0415 - it compiles the kernels

        native = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        return torch.bfloat16 if linear is not None or native else torch.float32
    return config_dtype


def choose_cache_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of a device's KV cache.

    Args:
        name: Value of `EngineSettings.kv_cache_dtype`; devices have different types for fp8_e4m3.
        dtype: Type of the weights, which `auto` stands for.
        device: The cache's device.
    """
    if name == "fp8_e4m3":
        return e4m3_dtype(device)
    return torch.float8_e5m2 if name == "fp8_e5m2" else dtype


def load(
    path: str,
    *,
    dtype: str,
    device: str,
    block_size: int,
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
    world: World | None = None,
    adapters: bool = False,
) -> LoadedModel:
    """Load a model as `load_unchecked` does, and check that it computes the same as transformers.

    Raises:
        SelfCheckError: The model's logits differ from those of transformers' own forward pass.
        UnsupportedModelError: The engine cannot serve the model; the message says why.
        ModelError: Transformers cannot load it.
        OSError: There is no such model.
    """
    loaded = load_unchecked(
        path,
        dtype=dtype,
        device=device,
        block_size=block_size,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        world=world,
        adapters=adapters,
    )
    forward: Forward = EagerForward(loaded.model)
    if world is not None:
        forward = RankForward(forward, world, loaded.shape.vocab_size, everywhere=True)
    with as_unsupported(path):
        loaded.pass_check(forward)
    return loaded


def load_unchecked(
    path: str,
    *,
    dtype: str,
    device: str,
    block_size: int,
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
    world: World | None = None,
    adapters: bool = False,
) -> LoadedModel:
    """Load a model, or this rank's part of it; no step of it has passed its self-check yet.

    Args:
        path: A directory or a hub name.
        dtype: See `EngineSettings`.
        device: See `EngineSettings`.
        block_size: See `EngineSettings`.
        quantization: See `EngineSettings`.
        kv_cache_dtype: See `EngineSettings`.
        max_model_len: See `EngineSettings`.
        world: The ranks that hold the model, all of which call this. Default: this process alone.
        adapters: Whether it is to take adapters, with this process alone; see `LoadedModel.trial`.

    Raises:
        SelfCheckError: The structure of the model is not that of transformers' own.
        UnsupportedModelError: The engine cannot serve the model; the message says why.
        ModelError: Transformers cannot load it.
        OSError: There is no such model.
    """
    target = choose_device(device)
    scheme = find_scheme(quantization)
    with _as_model_error(path):
        source = _Source.open(path, dtype, target, max_model_len, quantized=scheme is not None)
        model = source.read(world)
    kind, checkpoint = source.dtype, source.checkpoint
    cache_kind = choose_cache_dtype(kv_cache_dtype, kind, target)
    model.train(mode=False)
    replace_attention(model)
    with as_unsupported(path):
        with running_empty():
            shape = _inspect(model, max_model_len)
        _check_kernels(shape, block_size, kind, cache_kind, target)
        if scheme is not None:
            stored_format = None if checkpoint is None else checkpoint.format
            _check_quantizable(model, path, quantization, target, stored_format)
        if world is not None:
            check_splittable(shape, plain_cache=cache_kind == kind)
        else:
            _check_room(model, source, quantization)
        routing = ModuleRouting(model)
        small = is_small(model)
        place = None if small or world is not None else source.place(block_size)
        known = None if place is None else recall(place)
        with held(model) if small else nullcontext():
            expected, trial, forward = _expect(
                model, source, shape, routing, world, known, adapters
            )
            absorb_expansions(model)
            rounds = kind != torch.float32 or scheme is not None or checkpoint is not None
            checked = known is not None or not rounds
            if not checked and (small or not _check_twin(model, source, shape, block_size)):
                check_in_float32(
                    model, forward, expected, shape, target, block_size=block_size, routing=routing
                )
        if target.type == "cpu":
            tolerance = _pack(model, shape, path, scheme, checkpoint)
        else:
            tolerance = _pack_on_gpu(model, scheme, checkpoint, target)
        kv_scales = (
            None if cache_kind == kind else measure_kv_scales(model, shape, path, cache_kind)
        )
        check = SelfCheck(
            expected,
            shape,
            kind,
            target,
            block_size=block_size,
            tolerance=tolerance,
            cache_dtype=cache_kind,
            kv_scales=kv_scales,
            routing=routing,
            measure=source.measure_rounding if world is None and not small else None,
        )
    adapted = None if trial is None else TrialCheck(check.against(trial.expected), trial.scales)
    return LoadedModel(
        model,
        shape,
        kind,
        cache_kind,
        kv_scales,
        target,
        check,
        adapted,
        kept=place,
        variant=f"{quantization} {cache_kind} {adapters}",
    )


def _expect(  # noqa: PLR0917
    model: PreTrainedModel,
    source: "_Source",
    shape: ModelShape,
    routing: ModuleRouting,
    world: World | None,
    known: Reference | None,
    adapters: bool,
) -> tuple[Reference, TrialReference | None, Forward]:
    """Return the references without and with the trial adapter, and the step that is checked.

    Args:
        model: The model with its own attention, or this rank's part of it.
        source: The place that it is from.
        shape: Its dimensions.
        routing: Its layers of experts.
        world: The ranks that hold it.
        known: The results that it must compute, if they are remembered.
        adapters: Whether it is to take adapters.
    """
    forward: Forward = EagerForward(model)
    if world is not None:
        fix = partial(_fix_context, max_model_len=source.max_model_len)
        expected = whole_reference(
            source.path, source.config, source.dtype, shape, world, prepare=fix
        )
        return expected, None, RankForward(forward, world, shape.vocab_size, everywhere=True)
    with attention_of(model, reference_attention(source.config)):
        expected = known or reference(model, shape, routing)
        if not adapters:
            return expected, None, forward
        return expected, trial_reference(model, expected, routing, absorbed_linears(model)), forward


def load_empty(
    path: str,
    *,
    dtype: str,
    device: str,
    block_size: int,
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
) -> EmptyModel:
    """Make a model from its config alone, and check all that `load` checks without weights.

    Args:
        path: A directory with a config.
        dtype: See `EngineSettings`.
        device: See `EngineSettings`.
        block_size: See `EngineSettings`.
        quantization: See `EngineSettings`.
        kv_cache_dtype: See `EngineSettings`.
        max_model_len: See `EngineSettings`.

    Raises:
        UnsupportedModelError: The engine cannot serve the model; the message says why.
        ModelError: Transformers cannot make it.
    """
    target = choose_device(device)
    with _as_model_error(path):
        stored_format = find_format(Path(path))
        config = read_config(path, quantized=stored_format is not None)
        kind = choose_dtype(dtype, config.get_text_config(), target)
        model = make_empty(config, kind)
        replace_attention(model)
    cache_kind = choose_cache_dtype(kv_cache_dtype, kind, target)
    with as_unsupported(path), running_empty():
        shape = _inspect(model, max_model_len)
        _check_kernels(shape, block_size, kind, cache_kind, target)
        if find_scheme(quantization) is not None:
            _check_quantizable(model, path, quantization, target, stored_format)
    return EmptyModel(model, shape, kind, cache_kind, target, stored_format)


@dataclass(frozen=True, slots=True)
class _Source:
    """A model's files, and how its weights are read from them.

    Attributes:
        path: A directory or a hub name.
        config: The model's.
        checkpoint: Its checkpoint if its weights are quantized.
        dtype: Type of its weights.
        device: The model's device.
        max_model_len: See `EngineSettings`.
        deferred: Whether large weights stay in the files until they are packed.
    """

    path: str
    config: PreTrainedConfig
    checkpoint: QuantizedCheckpoint | None
    dtype: torch.dtype
    device: torch.device
    max_model_len: int | None
    deferred: bool

    @classmethod
    def open(
        cls,
        path: str,
        dtype: str,
        device: torch.device,
        max_model_len: int | None,
        *,
        quantized: bool,
    ) -> "_Source":
        """Read everything but the weights.

        Args:
            path: See the attributes.
            dtype: See `EngineSettings`.
            device: See the attributes.
            max_model_len: See the attributes.
            quantized: Whether weights are to be quantized.
        """
        checkpoint = open_checkpoint(path)
        config = read_config(path, quantized=checkpoint is not None)
        kind = choose_dtype(dtype, config.get_text_config(), device)
        deferred = device.type == "cpu" or quantized
        return cls(path, config, checkpoint, kind, device, max_model_len, deferred)

    def read(self, world: World | None = None) -> PreTrainedModel:
        """Read the model, or this rank's part of it.

        Raises:
            UnsupportedModelError: The weights cannot be split over the ranks.
        """
        if world is None:
            model: PreTrainedModel = load_weights(
                self.path,
                self.config,
                self.checkpoint,
                dtype=self.dtype,
                attn_implementation="eager",  # which all classes have
                device_map=self.device,
                deferred=self.deferred,
            )
            return model
        if self.checkpoint is not None:
            raise UnsupportedModelError(
                f"{self.path} has quantized weights ({self.checkpoint.format.description}), which"
                " are not split over ranks yet: use --tensor-parallel-size 1"
            )
        from octavo.engine.models.sharding.load_shard import load_shard  # noqa: PLC0415 - slow

        plan = make_plan(self.config, world.size)
        return load_shard(self.path, self.config, self.dtype, plan, world)

    def place(self, block_size: int) -> Path | None:
        """Return the file that remembers its checks' outcome; None if it is in no directory.

        Args:
            block_size: Tokens per block.
        """
        if not Path(self.path).is_dir():
            return None
        settings = {
            "dtype": str(self.dtype),
            "device": self.device.type,
            "max_model_len": self.max_model_len,
            "block_size": block_size,
        }
        return place_of(Path(self.path), settings)

    def measure_rounding(self, known: Reference, number: int) -> Reference:
        """Add the rounding errors of one pass of transformers' forward pass; see `SelfCheck`."""
        model = replace(self, deferred=True).read()  # there may be no memory for another one
        model.train(mode=False)
        _fix_context(model, self.max_model_len)
        set_attention(model, reference_attention(self.config))
        return with_rounding(known, model, ModuleRouting(model), passes=1, first=number)


def _pack(
    model: PreTrainedModel,
    shape: ModelShape,
    path: str,
    scheme: Scheme | None,
    checkpoint: QuantizedCheckpoint | None,
) -> float:
    """Quantize a model's weights, lay them out for the CPU kernels and return the tolerance."""
    # Imported here because it loads the CPU kernels.
    from octavo.engine.attention.packed_latents import pack_latents  # noqa: PLC0415
    from octavo.engine.models.experts.packed_experts import pack_experts  # noqa: PLC0415
    from octavo.engine.models.linear.packed_linear import pack_linears  # noqa: PLC0415
    from octavo.engine.models.quantization.checkpoints.packing import (  # noqa: PLC0415
        pack_checkpoint,
    )

    tolerance = 0.0
    replace_conv1d(model)
    if scheme is not None:
        scheme.quantize(model, shape, path)
        tolerance = scheme.tolerance
    if checkpoint is not None:
        tolerance = pack_checkpoint(model, checkpoint)
    pack_linears(model)
    pack_experts(model)
    pack_latents(model)
    hold(model)
    return tolerance


def _pack_on_gpu(
    model: PreTrainedModel,
    scheme: Scheme | None,
    checkpoint: QuantizedCheckpoint | None,
    device: torch.device,
) -> float:
    """Quantize a model's weights, move it to a GPU and return the tolerance."""
    tolerance = 0.0
    if scheme is not None:
        scheme.quantize_on_gpu(model, device)
        tolerance = scheme.tolerance
    if checkpoint is not None:
        tolerance = pack_checkpoint_on_gpu(model, checkpoint, device)
    hold(model)
    nn.Module.to(model, device)  # the model's own method has no types for it
    fuse_linears(model)
    group_experts(model)
    return tolerance


@contextmanager
def _as_model_error(path: str) -> Iterator[None]:
    """Turn errors of transformers into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"transformers cannot load {path}: {first_line(error)}") from error


@contextmanager
def as_unsupported(path: str) -> Iterator[None]:
    """Turn errors of a model's code into an UnsupportedModelError."""
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
            f"{path} cannot be served: its code does not run with paged attention"
            f" ({type(error).__name__}: {first_line(error)})"
        ) from error


def _check_twin(
    model: PreTrainedModel, source: _Source, shape: ModelShape, block_size: int
) -> bool:
    """Check the structure of a large model by a small one of its kind.

    Args:
        model: The large model.
        source: The place that it is from.
        shape: Its dimensions.
        block_size: Tokens per block.

    Returns:
        False if none could be made that has all kinds of its layers.

    Raises:
        SelfCheckError: Its results differ from those of transformers' forward pass.
    """
    try:
        twin = make_twin(model)
        nn.Module.to(twin, source.device)
        replace_attention(twin)
        twin_shape = _inspect(twin, source.max_model_len)
    except Exception as error:  # noqa: BLE001 - transformers raises many types
        log.info("the model has no small twin: it is checked itself", why=first_line(error))
        return False
    if not twin_shape.has_kinds_of(shape):
        log.info("the model has no small twin: it is checked itself", why="other layers")
        return False
    routing = ModuleRouting(twin)
    with attention_of(twin, reference_attention(twin.config)):
        expected = reference(twin, twin_shape, routing)
    absorb_expansions(twin)
    check_in_float32(
        twin,
        EagerForward(twin),
        expected,
        twin_shape,
        source.device,
        block_size=block_size,
        routing=routing,
    )
    return True


def _check_kernels(
    shape: ModelShape,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Refuse layers that no kernel computes."""
    for layer in set(shape.layers):
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


def _check_quantizable(
    model: PreTrainedModel,
    path: str,
    quantization: str,
    device: torch.device,
    stored_format: Format | None,
) -> None:
    """Refuse a model or device that `quantization`, which is not "none", does not work with."""
    if stored_format is not None:
        raise already_quantized(path, stored_format.description, quantization)
    scheme = find_scheme(quantization)
    if device.type == "cpu" and scheme is not None and not scheme.on_cpus:
        raise NotImplementedError(
            f"--quantization {quantization} works on GPUs only: use int8 or int4"
        )
    check_quantizable(model, path, quantization)


def _check_room(model: PreTrainedModel, source: _Source, quantization: str) -> None:
    """Refuse weights that do not fit into the free memory, before they are read.

    Args:
        model: The model; its weights are not read.
        source: The place that it is from.
        quantization: See `EngineSettings`.

    Raises:
        ModelError: They do not; the message names what would.
    """
    free = memory_of(source.device).available
    if sum(weight.nbytes for weight in {*model.parameters(), *model.buffers()}) <= free:
        return  # they take no more once they are packed
    stored = None if source.checkpoint is None else source.checkpoint.format
    empty = make_empty(source.config, source.dtype)
    if why := why_no_room(sizes_by_quantization(empty, source.device, stored), quantization, free):
        raise ModelError(why)


def _inspect(model: PreTrainedModel, max_model_len: int | None) -> ModelShape:
    """Return a model's dimensions, from its config and from a run of it.

    Raises:
        NotImplementedError: No kernel computes its attention.
    """
    config: Any = model.config.get_text_config(decoder=True)
    context = _fix_context(model, max_model_len)
    layers, states = probe(model, MAX_POSITIONS if context is None else context)
    if context is None:
        if layers:
            raise NotImplementedError("its config has no max_position_embeddings")
        context = MAX_POSITIONS  # states alone have no end
    return ModelShape(
        layers,
        vocab_size=config.vocab_size,
        max_position=context,
        eos_token_ids=_eos_token_ids(model),
        states=states,
    )


def _fix_context(model: PreTrainedModel, max_model_len: int | None) -> int | None:
    """Fix a model's rotary frequencies; return its context, None if its config lacks it."""
    context = _context(model.config.get_text_config(decoder=True))
    return None if context is None else fix_rope(model, context, max_model_len)


def _context(config: Any) -> int | None:  # noqa: ANN401 - has no such declared field
    """Return the tokens of a model's context; None if its config lacks them."""
    named = (getattr(config, name, None) for name in CONTEXT_NAMES)
    default = DEFAULT_CONTEXTS.get(config.model_type)
    return next((tokens for tokens in named if isinstance(tokens, int)), default)


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens of both configs: often only one names the end of a chat turn."""
    config: Any = model.config.get_text_config(decoder=True)
    generation_ids = _ids(getattr(model.generation_config, "eos_token_id", None))
    return tuple(sorted({*_ids(getattr(config, "eos_token_id", None)), *generation_ids}))


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
