"""Loads a decoder from transformers, with its attention replaced by paged attention."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Required, TypedDict, Unpack

import torch
from torch import nn
from transformers import PreTrainedModel

from octavo.common.models.errors import UnsupportedModelError
from octavo.common.models.image_families import IMAGE_FAMILIES
from octavo.engine.attention.latent import absorb_expansions, absorbed_linears
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.attention_layers import reference_attention, replace_attention
from octavo.engine.models.checks.adapter_reference import TrialReference, trial_reference
from octavo.engine.models.checks.module_routing import ModuleRouting
from octavo.engine.models.checks.probe import attention_of
from octavo.engine.models.checks.reference import Reference, reference
from octavo.engine.models.checks.remembered import recall, remember
from octavo.engine.models.checks.routing import Routing
from octavo.engine.models.checks.self_check import SelfCheck, SelfCheckError
from octavo.engine.models.checks.structure import check_in_float32
from octavo.engine.models.checks.twin_check import check_twin
from octavo.engine.models.checks.widened import all_small, is_small
from octavo.engine.models.deferred import held, hold
from octavo.engine.models.device import choose_device
from octavo.engine.models.device_only import keep_on_device
from octavo.engine.models.dimensions import find_dimensions, fix_context
from octavo.engine.models.dtypes import choose_cache_dtype
from octavo.engine.models.empty_model import running_empty
from octavo.engine.models.experts.grouped_experts import group_experts
from octavo.engine.models.forward import EagerForward, Forward
from octavo.engine.models.kv_scales import measure_kv_scales
from octavo.engine.models.linear.fuse_linears import fuse_linears
from octavo.engine.models.linear.plain_linears import replace_conv1d
from octavo.engine.models.model_classes import writes_text
from octavo.engine.models.model_source import ModelSource
from octavo.engine.models.quantization import find_scheme
from octavo.engine.models.quantization.base import Scheme
from octavo.engine.models.quantization.on_gpu import pack_checkpoint_on_gpu
from octavo.engine.models.read_weights import QuantizedCheckpoint
from octavo.engine.models.refusals import (
    as_model_error,
    as_unsupported,
    check_kernels,
    check_quantization,
    check_room,
)
from octavo.engine.models.sharding.rank_forward import RankForward
from octavo.engine.models.sharding.sharded_layers import own_choices
from octavo.engine.models.sharding.stages import keep_stage, plan_stages
from octavo.engine.models.sharding.whole_reference import whole_reference
from octavo.engine.models.vision import Vision, split_vision
from octavo.engine.parallel.world import World
from octavo.kernels import huge_pages
from octavo.kernels.ops import FP8_DTYPES


class LoadOptions(TypedDict, total=False):
    """Options of `load`; see `EngineSettings`."""

    dtype: Required[str]
    device: Required[str]
    block_size: Required[int]
    quantization: str
    kv_cache_dtype: str
    max_model_len: int | None
    stage_layers: Sequence[int]
    whole_experts: bool


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
        trial: The self-check with an adapter, if requested; no step has passed it yet.
        kept: The cache file of the self-check's reference, if any; see `pass_check`.
        variant: More properties that affect the outcome of the check.
        vision: The part that encodes images, if it has one.
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
    vision: Vision | None = None

    def pass_check(self, forward: Forward, routing: Routing | None = None) -> None:
        """Check a step, and cache its reference.

        Args:
            forward: The step.
            routing: Forces experts on the step; default: on the model's own modules.

        Raises:
            SelfCheckError: The step does not pass; then nothing is cached.
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
        scales: Scales by the name of each adapted layer.
    """

    check: SelfCheck
    scales: Mapping[str, float]


def load(
    path: str,
    *,
    world: World | None = None,
    adapters: bool = False,
    **options: Unpack[LoadOptions],
) -> LoadedModel:
    """Load a model as `load_unchecked` does, and check that it computes the same as transformers.

    Raises:
        SelfCheckError: The model's logits differ from those of transformers' own forward pass.
        UnsupportedModelError: The engine cannot serve the model; the message says why.
        ModelError: Transformers cannot load it.
        OSError: There is no such model.
    """
    loaded = load_unchecked(path, world=world, adapters=adapters, **options)
    forward: Forward = EagerForward(loaded.model)
    if world is not None:
        forward = RankForward(forward, world, loaded.shape.vocab_size, everywhere=True)
    with as_unsupported(path):
        loaded.pass_check(forward)
    return loaded


def load_unchecked(
    path: str,
    *,
    world: World | None = None,
    adapters: bool = False,
    **options: Unpack[LoadOptions],
) -> LoadedModel:
    """Load a model, or this rank's part of it; no step has passed the self-check yet.

    Args:
        path: A directory or a hub name.
        world: The ranks that hold the model; all of them call this. Default: this process alone.
        adapters: Whether the model takes adapters; see `LoadedModel.trial`.
        **options: The engine's settings.

    Raises:
        SelfCheckError: The model's structure differs from transformers' own.
        UnsupportedModelError: The engine cannot serve the model; the message says why.
        ModelError: Transformers cannot load it.
        OSError: There is no such model.
    """
    target, block_size = choose_device(options["device"]), options["block_size"]
    quantization = options.get("quantization", "none")
    max_model_len = options.get("max_model_len")
    scheme = find_scheme(quantization)
    experts = slice(None)
    with as_model_error(path):
        source = ModelSource.open(
            *(path, options["dtype"], target, max_model_len),
            quantized=scheme is not None,
            whole_experts=options.get("whole_experts", False),
            text_alone=world is not None,
        )
        own = _own_layers(source, world, options.get("stage_layers", ()))
        model = source.read(None if world is None or world.size == 1 else world)
    kind, checkpoint = source.dtype, source.checkpoint
    cache_kind = choose_cache_dtype(options.get("kv_cache_dtype", "auto"), kind, target)
    model.train(mode=False)
    vision = split_vision(model)
    if world is not None and world.place.rank:
        vision = None  # rank 0 encodes images for all
    replace_attention(model)
    with as_unsupported(path):
        with running_empty():
            shape = whole_shape = find_dimensions(model, max_model_len)
            small = is_small(model) if world is None else all_small(model, world)
            left_out = _absorbed_names(model) if adapters else None
            if own is not None and world is not None:
                shape, experts = keep_stage(model, shape, own, world)
        check_kernels(shape, block_size, kind, cache_kind, target)
        if scheme is not None:
            stored_format = None if checkpoint is None else checkpoint.format
            check_quantization(model, path, quantization, target, stored_format)
        if world is None:
            check_room(model, source, quantization)
        routing = ModuleRouting(model)
        place = None if small or world is not None else source.place(block_size)
        known = None if place is None else recall(place)
        with held(model) if small else nullcontext():
            expected, trial, forward = _expect(
                model, source, shape, routing, world, known, left_out
            )
            expected, trial = _of_this_rank(expected, trial, model, experts, source, world)
            absorb_expansions(model)
            rounds = kind != torch.float32 or scheme is not None or checkpoint is not None
            checked = known is not None or not rounds
            if not checked and (small or not check_twin(model, shape, source, block_size, world)):
                check_in_float32(
                    model, forward, expected, shape, target, block_size=block_size, routing=routing
                )
        if target.type == "cpu":
            tolerance = _pack(model, shape, path, scheme, checkpoint)
        else:
            tolerance = _pack_on_gpu(model, scheme, checkpoint, target)
        kv_scales = (
            measure_kv_scales(model, shape, path, cache_kind) if cache_kind in FP8_DTYPES else None
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
    if vision is not None:
        vision.place(target, whole_shape)
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
        vision=vision,
    )


def _own_layers(source: ModelSource, world: World | None, asked: Sequence[int]) -> range | None:
    """Return the layers of this process's stage; None without stages.

    Raises:
        UnsupportedModelError: Several processes cannot serve the model.
    """
    kind = source.config.model_type
    if world is not None and kind not in IMAGE_FAMILIES and not writes_text(source.config):
        why = f"{source.path} is of the type {kind!r}, which ranks do not serve: use one process"
        raise UnsupportedModelError(why)
    if world is None or world.stages == 1:
        return None
    return plan_stages(source.config, world.stages, asked)[world.stage]


def _of_this_rank(  # noqa: PLR0917
    expected: Reference,
    trial: TrialReference | None,
    model: PreTrainedModel,
    experts: slice,
    source: ModelSource,
    world: World | None,
) -> tuple[Reference, TrialReference | None]:
    """Return references with the choices of this rank's layers, in its numbers of experts."""

    def own(whole: Reference) -> Reference:
        choices = whole.choices[experts]
        if source.whole_experts and world is not None:
            choices = own_choices(model, choices, world)
        return replace(whole, choices=choices)

    return own(expected), None if trial is None else replace(trial, expected=own(trial.expected))


def _absorbed_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the linear layers that `absorb_expansions` would replace."""
    absorbed = absorbed_linears(model)
    return {name for name, layer in model.named_modules() if layer in absorbed}


def _expect(  # noqa: PLR0917
    model: PreTrainedModel,
    source: ModelSource,
    shape: ModelShape,
    routing: ModuleRouting,
    world: World | None,
    known: Reference | None,
    left_out: Collection[str] | None,
) -> tuple[Reference, TrialReference | None, Forward]:
    """Return the references without and with the trial adapter, and the checked step.

    Args:
        model: The model with transformers' own attention, or this rank's part of it.
        source: Its files.
        shape: Its dimensions.
        routing: The routing of its expert layers.
        world: The ranks that hold it.
        known: The cached reference, if any.
        left_out: Names of layers that adapters cannot adapt; None if it takes no adapters.
    """
    forward: Forward = EagerForward(model)
    if world is not None:
        fix = partial(fix_context, max_model_len=source.max_model_len)
        references = whole_reference(
            *(source.path, source.config, source.dtype, shape, world),
            checkpoint=source.checkpoint,
            prepare=fix,
            left_out=left_out,
        )
        return *references, RankForward(forward, world, shape.vocab_size, everywhere=True)
    with attention_of(model, reference_attention(source.config)):
        expected = known or reference(model, shape, routing)
        if left_out is None:
            return expected, None, forward
        return expected, trial_reference(model, expected, routing, left_out), forward


def _pack(
    model: PreTrainedModel,
    shape: ModelShape,
    path: str,
    scheme: Scheme | None,
    checkpoint: QuantizedCheckpoint | None,
) -> float:
    """Quantize a model's weights, pack them for the CPU kernels and return the tolerance."""
    # Imported here because it loads the CPU kernels.
    from octavo.engine.attention.packed_latents import pack_latents  # noqa: PLC0415
    from octavo.engine.models.experts.packed_experts import pack_experts  # noqa: PLC0415
    from octavo.engine.models.linear.packed_linear import pack_linears  # noqa: PLC0415
    from octavo.engine.models.quantization.calibration import (  # noqa: PLC0415
        calibration_tokens,
        run_alone,
    )
    from octavo.engine.models.quantization.formats.packing import (  # noqa: PLC0415
        pack_checkpoint,
    )

    tolerance = 0.0
    replace_conv1d(model)
    if scheme is not None:
        tokens = calibration_tokens(path, shape)
        scheme.quantize(model, partial(run_alone, model, shape, tokens))
        tolerance = scheme.tolerance
    if checkpoint is not None:
        tolerance = pack_checkpoint(model, checkpoint)
    pack_linears(model)
    pack_experts(model)
    pack_latents(model)
    hold(model)
    huge_pages.gather([*model.parameters(), *model.buffers()])
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
    nn.Module.to(model, device)  # the model's own method is untyped
    fuse_linears(model)
    group_experts(model)
    keep_on_device(model)
    return tolerance
