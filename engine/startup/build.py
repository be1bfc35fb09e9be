"""Builds the engine's parts, in six phases."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
import torch

from octavo.common.limits import Limits
from octavo.engine.constraints.token_table import TokenTable
from octavo.engine.constraints.tokens import read_tokens
from octavo.engine.execution.executor import Executor
from octavo.engine.execution.leader import Leader
from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.kv_disk.disk_tier import DiskTier
from octavo.engine.lora.adapter import AdapterRegistry
from octavo.engine.memory.cache_tensors import GIB
from octavo.engine.memory.freed import return_freed
from octavo.engine.models.vision import Vision
from octavo.engine.parallel.place import RankPlace
from octavo.engine.parallel.world import telling_failures
from octavo.engine.scheduling.image_encodes import ImageEncodes
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.scheduling.swap_or_recompute import PreemptionPolicy
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import generation_config
from octavo.engine.startup.allocate import allocate
from octavo.engine.startup.cache_plan import (
    CachePlan,
    CacheSize,
    measure,
    plan_cache,
    size_cache,
)
from octavo.engine.startup.capacity import naming_uncompiled
from octavo.engine.startup.disk_tier import block_layout, open_disk_tier
from octavo.engine.startup.find_model import find_model
from octavo.engine.startup.generation_config import Defaults
from octavo.engine.startup.image_check import check_images
from octavo.engine.startup.load import Loaded, load
from octavo.engine.startup.record import record
from octavo.engine.startup.spill import open_spill
from octavo.engine.startup.threads import Threads, set_threads
from octavo.kernels.ops import device_warning, kernel_path

log = structlog.get_logger(__name__)


DECODE_ENGINE_PREFILL_SECONDS = 0.1
"""Maximum time for which a step of a decode engine computes prompts beside decodes."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine, ready to run.

    Attributes:
        path: The model's directory.
        scheduler: The scheduler, with an empty cache.
        executor: The executor, warmed up.
        limits: The limits of requests.
        eos_token_ids: The model's end-of-sequence tokens.
        block_bytes: Bytes per block, over all layers.
        max_num_seqs: Maximum sequences in the running batch.
        max_num_batched_tokens: Maximum tokens computed in a step.
        device: The device's name.
        dtype: The weights' data type.
        kernels: The kernels' name from `octavo.kernels.ops.kernel_path`.
        warnings: Reasons why the engine is slow, and remedies.
        defaults: The model's own defaults for parameters that requests do not set.
        threads: The threads that compute on a CPU.
        read_tokens: Returns the texts of the model's tokens; None if outputs cannot be
            constrained.
        leader: Sends steps to the other ranks; None if there are none.
        adapters: The adapters that requests may name; None if the engine takes none.
        block_layout: Name of all that blocks' contents depend on; empty if they cannot be shared.
        disk: The KV cache's tier on disk; None if there is none.
        vision: The part that encodes images; None if the engine reads text alone.
    """

    path: Path
    scheduler: Scheduler
    executor: Executor
    limits: Limits
    eos_token_ids: tuple[int, ...]
    block_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    kernels: str
    warnings: tuple[str, ...]
    defaults: Defaults
    threads: Threads
    read_tokens: Callable[[], TokenTable] | None
    leader: Leader | None = None
    adapters: AdapterRegistry | None = None
    block_layout: str = ""
    disk: DiskTier | None = None
    vision: Vision | None = None

    @property
    def ranks(self) -> int:
        """Number of processes that hold a part of the model."""
        return 1 if self.leader is None else self.leader.world.place.size


@telling_failures()
@naming_uncompiled()
def build(settings: EngineSettings, place: RankPlace | None = None) -> Parts:
    """Load the model, allocate the KV cache, and warm up.

    Args:
        settings: The engine's settings.
        place: The place of this rank among several; rank 0.

    Raises:
        StartupError: The settings conflict with each other, the model or the machine.
        UnsupportedModelError: The engine cannot serve the model.
        ModelError: The model cannot be read.
        OSError: There is no such model.
    """
    began = time.perf_counter()
    threads = set_threads(place)
    path, has_tokenizer = find_model(settings)
    loaded = load(settings, path, place)
    _log(began, "model loaded", model=settings.model, compiled=loaded.model.compiled)
    if loaded.model.vision is not None:
        loaded = replace(loaded, model=check_images(loaded.model, settings.block_size))
    return_freed()  # before the cache's memory is counted
    plan = plan_cache(settings, loaded)
    size = size_cache(settings, loaded, plan, measure(settings, loaded, plan))
    executor = warm_up(settings, loaded, plan, size)
    _log(
        began,
        "cache ready",
        num_blocks=size.num_blocks,
        num_swap_blocks=size.num_swap_blocks,
        block_sizes=[group.block_size for group in plan.layout.groups],
        dtype=_name(loaded.model.cache_dtype),
        gib=round(size.num_blocks * plan.block_bytes / GIB, 3),
        max_model_len=size.max_model_len,
    )
    if loaded.model.vision is not None and loaded.model.vision.bidirectional:
        loaded.model.vision.longest = plan.max_num_batched_tokens - plan.max_num_seqs
    scheduler = make_scheduler(settings, loaded, plan, size)
    shape, device = loaded.model.shape, loaded.model.device
    limits = _limits(settings, loaded, plan, size, has_tokenizer=has_tokenizer)
    layout = block_layout(settings, path, loaded, plan, size)
    warning = device_warning(device)
    return Parts(
        path=path,
        scheduler=scheduler,
        executor=executor,
        limits=limits,
        eos_token_ids=shape.eos_token_ids,
        block_bytes=plan.block_bytes,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        device=_device_name(device),
        dtype=_name(loaded.model.dtype),
        kernels=kernel_path(device),
        warnings=() if warning is None else (warning,),
        defaults=_defaults(settings, path, limits),
        threads=threads,
        read_tokens=partial(read_tokens, path, shape.vocab_size, shape.eos_token_ids)
        if limits.constraints
        else None,
        leader=loaded.leader,
        adapters=loaded.adapters,
        block_layout=layout,
        disk=open_disk_tier(settings, layout, plan.block_bytes),
        vision=loaded.model.vision,
    )


def warm_up(settings: EngineSettings, loaded: Loaded, plan: CachePlan, size: CacheSize) -> Executor:
    """Return the executor with its cache, warmed up."""
    spill = None
    if size.spill is not None and settings.kv_spill is not None:
        spill = open_spill(settings.kv_spill, size.spill)
    tensors = allocate(
        plan.layout, loaded.model, size.num_blocks, size.num_swap_blocks, loaded.leader, spill=spill
    )
    executor = Executor(loaded.model, tensors, loaded.leader, loaded.device_adapters)
    if not loaded.on_gpu:  # the self-check has run all of a CPU's kernels
        return executor
    executor.warm_up(size.max_model_len, plan.max_num_batched_tokens)
    if settings.cuda_graphs:
        record(executor, plan.graph_sizes, size.max_model_len, loaded.world)
    return executor


def make_scheduler(
    settings: EngineSettings, loaded: Loaded, plan: CachePlan, size: CacheSize
) -> Scheduler:
    """Return the scheduler, with an empty cache."""
    cache = KVCacheManager(
        num_blocks=size.num_blocks,
        groups=size.budget.groups,
        num_swap_blocks=size.num_swap_blocks,
        prefix_caching=settings.enable_prefix_caching,
        step_tokens=plan.max_num_batched_tokens,
    )
    draft_model = None
    if loaded.draft_model is not None:
        draft_model = loaded.draft_model.start(
            size.num_blocks, plan.max_num_seqs, plan.max_num_batched_tokens
        )
    decodes_first = settings.role == "decode"
    return Scheduler(
        cache,
        PreemptionPolicy(settings.preemption),
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_prefill_seconds=DECODE_ENGINE_PREFILL_SECONDS if decodes_first else math.inf,
        adapter_limit=loaded.adapter_limit,
        speculation=plan.speculation,
        draft_model=draft_model,
        stages=settings.pipeline_parallel_size,
        images=None
        if loaded.model.vision is None
        else ImageEncodes(
            settings.max_encoder_tokens,
            settings.encoder_cache_tokens,
            loaded.model.vision.longest or 0,
        ),
    )


def _limits(
    settings: EngineSettings,
    loaded: Loaded,
    plan: CachePlan,
    size: CacheSize,
    *,
    has_tokenizer: bool,
) -> Limits:
    """Return the limits of requests."""
    shape = loaded.model.shape
    return Limits(
        vocab_size=shape.vocab_size,
        max_model_len=size.max_model_len,
        max_outputs=min(settings.max_outputs, plan.max_num_seqs),
        budgets=(size.budget,),
        beam_search=True,
        constraints=has_tokenizer and bool(shape.eos_token_ids),
        images=loaded.model.vision is not None,
    )


def _defaults(settings: EngineSettings, path: Path, limits: Limits) -> Defaults:
    """Return the model's own defaults, unless they are turned off."""
    if settings.generation_config == "none":
        return Defaults()
    return generation_config.read(path, limits)


def _log(began: float, event: str, **fields: object) -> None:
    log.info(event, **fields, seconds=round(time.perf_counter() - began, 2))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
