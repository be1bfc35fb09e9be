"""Builds the engine's parts: loads the model, allocates memory and warms up."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import torch

from octavo.common import resources
from octavo.common.layer_groups import BlockBudget
from octavo.common.limits import Limits
from octavo.common.models.checkpoint import check_checkpoint
from octavo.common.models.errors import ModelError
from octavo.common.models.files import CONFIG, read_json
from octavo.common.models.rope_context import first_context
from octavo.common.models.tokenizer_files import check_tokenizer_files
from octavo.common.sampling_parameters import MAX_LOGPROBS, SamplingParams
from octavo.common.topology import format_list, read_nodes
from octavo.engine import generation_config
from octavo.engine.adapters.adapter import AdapterRegistry
from octavo.engine.adapters.device_adapters import DeviceAdapters
from octavo.engine.adapters.errors import AdapterError
from octavo.engine.capacity import (
    StartupError,
    batch_size,
    count_blocks,
    count_swap_blocks,
    keeps_blocks,
    longest_sequence,
)
from octavo.engine.compilation.load_step import LoadedStep, load_step
from octavo.engine.constraints.token_table import TokenTable
from octavo.engine.constraints.tokens import read_tokens
from octavo.engine.draft_startup import LoadedDraftModel
from octavo.engine.generation_config import Defaults
from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.memory.cache_layout import CacheLayout, plan_layout
from octavo.engine.memory.cache_tensors import (
    GIB,
    CacheTensors,
    free_memory,
    memory_of,
    peak_memory,
)
from octavo.engine.memory.freed import mapping_large, return_freed
from octavo.engine.models.device import choose_device
from octavo.engine.models.resolve import resolve
from octavo.engine.ranks.place import Place as RankPlace
from octavo.engine.ranks.world import World, join
from octavo.engine.running.cuda_graphs import cuda_recorder
from octavo.engine.running.executor import Executor
from octavo.engine.running.ranks import Leader
from octavo.engine.scheduling.batch import Batch, ScheduledSequence
from octavo.engine.scheduling.request import Request
from octavo.engine.scheduling.scheduler import MAX_SCORED_TOKENS, Scheduler
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup
from octavo.engine.scheduling.swap_or_recompute import PreemptionPolicy
from octavo.engine.settings import EngineSettings
from octavo.engine.speculation.methods import make_speculation
from octavo.engine.speculation.speculation import Speculation
from octavo.engine.threads import Threads, choose_threads
from octavo.kernels.ops import device_warning, kernel_path

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine, ready to run.

    Attributes:
        scheduler: The scheduler, with an empty cache.
        executor: The executor, warmed up.
        limits: The limits of requests.
        eos_token_ids: The model's end-of-sequence tokens.
        block_bytes: Bytes per block, all layers.
        max_num_seqs: Maximum sequences in the running batch.
        max_num_batched_tokens: Maximum tokens computed in a step.
        device: The device's name.
        dtype: The weights' data type.
        kernels: What computes, as `octavo.kernels.ops.kernel_path` names it.
        warnings: What makes the engine slow and what to do about it.
        defaults: The model's own defaults of what requests do not set.
        threads: The threads that compute on a CPU.
        read_tokens: Returns the texts of the model's tokens; None if outputs cannot be
            constrained.
        leader: Tells the other ranks what to do; None if there are none.
        adapters: The adapters that requests may name; None if the engine takes none.
    """

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

    @property
    def ranks(self) -> int:
        """Processes that hold a part of the model."""
        return 1 if self.leader is None else self.leader.world.size


def build(settings: EngineSettings, place: RankPlace | None = None) -> Parts:
    """Load the model, allocate the KV cache, and warm up.

    Args:
        settings: The engine's settings.
        place: Which rank this is, of several; rank 0.

    Raises:
        StartupError: The settings do not fit each other, the model or the machine.
        UnsupportedModelError: The engine cannot serve the model.
        ModelError: The model cannot be read.
        OSError: There is no such model.
    """
    began = time.perf_counter()
    threads = set_threads(place)
    with mapping_large():
        model = resolve(settings.source, packed=keeps_blocks(settings))
    check_checkpoint(Path(model))
    _warn_of_rope(settings, Path(model))
    has_tokenizer = _has_tokenizer(Path(model))
    world = None if place is None else join_ranks(settings, place)
    leader = None if world is None else Leader(world)
    loaded = load_step(settings, model, world)
    log.info(
        "model loaded",
        model=settings.model,
        compiled=loaded.compiled,
        seconds=round(time.perf_counter() - began, 2),
    )
    drafting = None
    if settings.draft_model is not None:
        drafting = LoadedDraftModel(settings, settings.draft_model, loaded.shape)
    adapters = _load_adapters(settings, loaded)
    return_freed()  # before the memory is counted that the cache may have
    max_num_seqs, batched = batch_size(settings, loaded.device)
    layout = plan_layout(loaded.shape, settings.block_size, loaded.dtype, loaded.cache_dtype)
    speculation = _speculation(settings, layout)
    num_drafted = 0 if speculation is None else speculation.num_tokens
    block_bytes = layout.block_elements * loaded.cache_dtype.itemsize
    tokens = min(batched, settings.max_model_len or loaded.shape.max_position)
    # At most one block more in each group, as the largest batch has two sequences.
    least = sum(layout.sequence_blocks(tokens)) + len(layout.groups)
    probe = Executor(loaded, _allocate(layout, loaded, least, 0, leader), leader)
    if loaded.device.type == "cuda":  # a CPU has no peak to measure
        _run_largest_step(probe, loaded, tokens, max_num_seqs, layout)
    taken = _memory_taken(
        probe,
        loaded,
        settings,
        block_bytes,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        num_drafted=num_drafted,
    )
    del probe
    limit = _adapter_limit(settings, loaded.device)
    taken += limit or 0
    draft_bytes = 0 if drafting is None else drafting.block_bytes  # it has as many blocks
    num_blocks, num_swap_blocks = count_pool(
        settings, loaded, block_bytes, taken, place, draft_bytes=draft_bytes
    )
    if leader is not None:
        num_blocks, num_swap_blocks = leader.count(num_blocks, num_swap_blocks)
    budget = BlockBudget(num_blocks, layout.groups, batched)
    most = loaded.shape.max_position
    max_model_len = longest_sequence(settings, most, budget)
    if settings.max_model_len is None and max_model_len < most:
        log.warning("context limited by the cache", model=most, max_model_len=max_model_len)
    cache_tensors = _allocate(layout, loaded, num_blocks, num_swap_blocks, leader)
    executor = Executor(loaded, cache_tensors, leader, _device_adapters(loaded, limit))
    executor.warm_up(max_model_len)
    if loaded.device.type == "cuda" and settings.cuda_graphs and leader is None:
        _record_graphs(executor, max_model_len, max_num_seqs, batched, num_drafted)
    log.info(
        "cache ready",
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        block_sizes=[group.block_size for group in layout.groups],
        dtype=str(loaded.cache_dtype).removeprefix("torch."),
        gib=round(num_blocks * block_bytes / GIB, 3),
        max_model_len=max_model_len,
        seconds=round(time.perf_counter() - began, 2),
    )
    cache = KVCacheManager(
        num_blocks=num_blocks,
        groups=layout.groups,
        num_swap_blocks=num_swap_blocks,
        prefix_caching=settings.enable_prefix_caching,
        step_tokens=batched,
    )
    scheduler = Scheduler(
        cache,
        PreemptionPolicy(settings.preemption),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        adapter_limit=limit,
        speculation=speculation,
        draft_model=None if drafting is None else drafting.start(num_blocks, batched),
    )
    shape = loaded.shape
    limits = Limits(
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len,
        max_outputs=min(settings.max_outputs, max_num_seqs),
        budgets=(budget,),
        beam_search=True,
        constraints=has_tokenizer and bool(shape.eos_token_ids),
    )
    return Parts(
        scheduler=scheduler,
        executor=executor,
        limits=limits,
        eos_token_ids=shape.eos_token_ids,
        block_bytes=block_bytes,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        device=_device_name(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        kernels=kernel_path(loaded.device),
        warnings=_warnings(loaded.device),
        defaults=_defaults(settings, Path(model), limits),
        threads=threads,
        read_tokens=partial(read_tokens, Path(model), shape.vocab_size, shape.eos_token_ids)
        if limits.constraints
        else None,
        leader=leader,
        adapters=adapters,
    )


def join_ranks(settings: EngineSettings, place: RankPlace) -> World:
    """Join the other ranks of an engine.

    Raises:
        StartupError: They cannot be reached, or the device cannot have several ranks.
    """
    device = choose_device(settings.device)
    if device.type == "cpu" and torch.cuda.is_available():
        raise StartupError(
            "--device cpu with several ranks needs a process that sees no GPU: set"
            " CUDA_VISIBLE_DEVICES to nothing"
        )
    if device.type == "cuda" and place.local_size > torch.cuda.device_count():
        raise StartupError(
            f"this machine has {torch.cuda.device_count()} GPUs for {place.local_size} ranks: lower"
            " --tensor-parallel-size, or start ranks on more machines"
        )
    try:
        world = join(place, device, watch_seconds=settings.rank_timeout)
    except (RuntimeError, ValueError) as error:
        raise StartupError(f"the ranks do not find each other: {error}") from error
    log.info("ranks joined", rank=place.rank, ranks=place.size)
    return world


def count_pool(
    settings: EngineSettings,
    loaded: LoadedStep,
    block_bytes: int,
    taken: int,
    place: RankPlace | None = None,
    *,
    draft_bytes: int = 0,
) -> tuple[int, int]:
    """Return the blocks on the device and in swap space that this process has room for.

    Args:
        settings: The engine's settings; sizes in bytes are of all ranks together.
        loaded: The model, or this rank's part.
        block_bytes: Bytes per block, or of this rank's part of one.
        taken: Bytes that the cache cannot use.
        place: Which rank this is, of several.
        draft_bytes: Bytes on the device that each block needs in the draft model's cache.

    Raises:
        StartupError: They do not fit.
    """
    own, ranks_here = settings, 1
    if place is not None:
        gib = {"cache_memory": settings.cache_memory, "swap_space": settings.swap_space}
        shares = {name: size / place.size for name, size in gib.items() if size is not None}
        own, ranks_here = settings.model_copy(update=shares), place.local_size
    swap = count_swap_blocks(own, block_bytes)
    if settings.swap_space is None:  # a share of memory that the ranks of a machine have in common
        swap //= ranks_here
    blocks = count_blocks(own, loaded.device, block_bytes + draft_bytes, swap, taken=taken)
    if settings.num_blocks is None and settings.cache_memory is None:
        blocks = blocks // ranks_here if loaded.device.type == "cpu" else blocks
    return blocks, swap


def _load_adapters(settings: EngineSettings, loaded: LoadedStep) -> AdapterRegistry | None:
    """Load the adapters of --lora.

    Raises:
        StartupError: One of them cannot be served.
    """
    if loaded.targets is None:
        return None
    limit = _adapter_limit(settings, loaded.device)
    registry = AdapterRegistry(loaded.targets, settings.model_names, limit)
    for name, path in settings.adapters.items():
        try:
            registry.add(registry.read(name, Path(path)))
        except AdapterError as error:
            raise StartupError(f"--lora {name}: {error}") from error
        log.info("adapter loaded", adapter=name, path=path)
    return registry


def _adapter_limit(settings: EngineSettings, device: torch.device) -> int | None:
    """Return the bytes that adapters may take on the device; None on a CPU, or if it takes none."""
    if device.type == "cpu" or not settings.takes_adapters:
        return None
    return int(settings.adapter_memory * GIB)


def _device_adapters(loaded: LoadedStep, limit: int | None) -> DeviceAdapters | None:
    """Return what keeps adapters on the device; None if the engine takes none."""
    if loaded.targets is None:
        return None
    return DeviceAdapters(loaded.device, limit, loaded.targets.packed)


def _speculation(settings: EngineSettings, layout: CacheLayout) -> Speculation | None:
    """Return what drafts tokens.

    Raises:
        StartupError: Drafted tokens of this model could not be rolled back.
    """
    if settings.speculation == "off" or not any(group.state_blocks for group in layout.groups):
        return make_speculation(settings.speculation, settings.num_speculative_tokens)
    why = "layers of this model keep states (Mamba, gated delta rules, convolutions), which cannot"
    why += " be rolled back to before a wrong draft"
    if settings.speculation != "auto":
        raise StartupError(f"--speculation must be off or auto; got {settings.speculation}: {why}")
    log.info("no tokens are drafted", why=why)
    return None


def _warn_of_rope(settings: EngineSettings, model: Path) -> None:
    """Say that short texts get other logits, if `--max-model-len` asks for a stretched context.

    A cache cannot change the frequencies of keys that it holds, so all lengths have the same ones.
    """
    first = first_context(read_json(model / CONFIG))
    if first is not None and (settings.max_model_len or 0) > first:
        log.warning(
            "all lengths have the rotary frequencies of long ones, which transformers has beyond"
            " the original context alone",
            original_context=first,
            max_model_len=settings.max_model_len,
            hint=f"set --max-model-len to {first} or less for its logits of short texts",
        )


def _has_tokenizer(model: Path) -> bool:
    """Return whether the model has a tokenizer: routers need one, and so do constraints."""
    try:
        check_tokenizer_files(model)
    except ModelError as error:
        log.warning(
            "routers need --tokenizer to use this engine, and outputs cannot be constrained",
            reason=str(error),
        )
        return False
    return True


def _defaults(settings: EngineSettings, model: Path, limits: Limits) -> Defaults:
    """Return the model's own defaults, unless they are turned off."""
    if settings.generation_config == "none":
        return Defaults()
    return generation_config.read(model, limits)


def _warnings(device: torch.device) -> tuple[str, ...]:
    """Return the warnings that clients should see."""
    warning = device_warning(device)
    return () if warning is None else (warning,)


def set_threads(place: RankPlace | None = None) -> Threads:
    """Make PyTorch compute with the threads that suit this process' cores; return them.

    Args:
        place: Which rank this is, of several that divide the machine's cores.
    """
    nodes, quota = read_nodes(), resources.cpu_quota()
    if place is not None:
        nodes, quota = place.share_of(nodes), quota / place.local_size
    threads = choose_threads(nodes, quota, os.environ, torch.get_num_threads())
    if threads.count != torch.get_num_threads():
        torch.set_num_threads(threads.count)
    log.info(
        "threads chosen",
        threads=threads.count,
        cpus=format_list(threads.cpus),
        numa_nodes=format_list(threads.nodes),
    )
    return threads


def _allocate(
    layout: CacheLayout,
    loaded: LoadedStep,
    num_blocks: int,
    num_swap_blocks: int,
    leader: Leader | None,
) -> CacheTensors:
    if leader is not None:
        leader.allocate(num_blocks, num_swap_blocks)
    return allocate(layout, loaded, num_blocks, num_swap_blocks)


def allocate(
    layout: CacheLayout, loaded: LoadedStep, num_blocks: int, num_swap_blocks: int
) -> CacheTensors:
    """Return the cache's tensors, or this rank's part of them."""
    return CacheTensors(
        layout,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        dtype=loaded.cache_dtype,
        device=loaded.device,
        model_dtype=loaded.dtype,
    )


def _run_largest_step(
    executor: Executor, loaded: LoadedStep, tokens: int, seqs: int, layout: CacheLayout
) -> None:
    """Run the largest step, to measure the peak memory of activations and logits."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(loaded.device)  # loading may have used more
    executor.execute(largest_batch(tokens, seqs, layout))
    torch.cuda.synchronize(loaded.device)


def largest_batch(tokens: int, seqs: int, layout: CacheLayout) -> Batch:
    """Return the batch that needs the most memory: the one with the most logits.

    Args:
        tokens: Tokens computed; as many prompt tokens are scored as the scheduler allows.
        seqs: Sequences that sample a token.
        layout: Of the cache.
    """
    scored = min(tokens, MAX_SCORED_TOKENS)
    params = SamplingParams(logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)
    batch, first = Batch(), 0
    for size, sampling in ((scored, params), (tokens - scored, SamplingParams())):
        if not size:
            continue
        # All prompt tokens but the last are scored.
        request = Request(0, "warm-up", (0,) * (size + 1), sampling, 1, time.monotonic())
        sequence = Sequence(0, 0, list(request.prompt), size + 1)
        group = SequenceGroup(request, [sequence])
        counts = layout.sequence_blocks(size)
        tables = [list(range(first, first := first + count)) for count in counts]
        sampled = [sequence] * seqs if not batch else []
        batch.ruled.append(ScheduledSequence(group, sequence, 0, size, tables, sampled))
    return batch


def _memory_taken(
    probe: Executor,
    loaded: LoadedStep,
    settings: EngineSettings,
    block_bytes: int,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_drafted: int,
) -> int:
    """Return the bytes that the cache cannot use; 0 if the cache's size is set.

    On a GPU these are the peak of the largest step, without the probe's own cache, and the CUDA
    graphs.
    """
    is_set = settings.num_blocks is not None or settings.cache_memory is not None
    if is_set or loaded.device.type != "cuda":
        return 0
    taken = peak_memory(loaded.device) - probe.cache.device.nbytes
    if not settings.cuda_graphs or settings.tensor_parallel_size > 1:
        return taken
    most = settings.max_model_len or loaded.shape.max_position
    blocks = memory_of(loaded.device).total // block_bytes
    capacity = BlockBudget(blocks, probe.cache.layout.groups, most).capacity(most)
    try:
        graphs = probe.measure_graphs(
            max_num_seqs=max_num_seqs,
            max_model_len=capacity,
            record=cuda_recorder(),
            free=partial(free_memory, loaded.device),
            num_drafted=num_drafted,
            max_num_batched_tokens=max_num_batched_tokens,
        )
    except RuntimeError:  # `_record_graphs` logs it
        return taken
    log.info("CUDA graphs measured", gib=round(graphs / GIB, 3))
    return taken + graphs


def _record_graphs(
    executor: Executor, max_model_len: int, max_num_seqs: int, batched: int, num_drafted: int
) -> None:
    """Record CUDA graphs; if the model cannot be recorded, log a warning."""
    try:
        executor.record_graphs(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            record=cuda_recorder(),
            num_drafted=num_drafted,
            max_num_batched_tokens=batched,
        )
    except RuntimeError as error:
        log.warning("no CUDA graphs: steps launch each kernel, which is slower", error=str(error))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
