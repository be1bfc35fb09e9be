"""Plans the KV cache: its layout, its memory and its size."""

import sys
import time
from dataclasses import dataclass

import structlog
import torch

from octavo.common.kv_cache.layer_groups import BlockBudget
from octavo.common.sampling_parameters import MAX_LOGPROBS
from octavo.engine.compilation.load_forward import LoadedForward
from octavo.engine.execution.executor import Executor
from octavo.engine.execution.graph_sizes import GraphSize, step_sizes
from octavo.engine.memory.cache_layout import CacheLayout, plan_layout
from octavo.engine.memory.cache_tensors import (
    memory_of,
    peak_memory,
    reset_peak,
)
from octavo.engine.memory.spill_file import SpillPlan
from octavo.engine.parallel.place import RankPlace
from octavo.engine.scheduling.batch import Batch, ScheduledSequence
from octavo.engine.scheduling.request import Request
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.engine.scheduling.scheduler import MAX_SCORED_TOKENS
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup
from octavo.engine.settings import EngineSettings
from octavo.engine.speculation.methods import make_speculation
from octavo.engine.speculation.speculation import Speculation
from octavo.engine.startup.allocate import allocate
from octavo.engine.startup.capacity import (
    StartupError,
    batch_size,
    count_blocks,
    count_swap_blocks,
    longest_sequence,
)
from octavo.engine.startup.load import Loaded
from octavo.engine.startup.record import measure_recorded
from octavo.engine.startup.spill import plan_spill

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The quantities that determine a cache's size.

    Attributes:
        layout: The layout of its blocks.
        block_bytes: Bytes per block, over all layers.
        max_num_seqs: Maximum sequences in the running batch.
        max_num_batched_tokens: Maximum tokens computed in a step.
        speculation: The speculation that drafts tokens; None without drafts.
    """

    layout: CacheLayout
    block_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    speculation: Speculation | None

    @property
    def graph_sizes(self) -> list[GraphSize]:
        """Sizes of the steps to record as CUDA graphs."""
        drafted = 0 if self.speculation is None else self.speculation.num_tokens
        return step_sizes(self.max_num_seqs, drafted, self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """A cache's size.

    Attributes:
        num_blocks: Blocks on the device.
        num_swap_blocks: Blocks in swap space.
        budget: The blocks that sequences need.
        max_model_len: Maximum tokens of a sequence.
        spill: Sizes of the file of --kv-spill; None without it.
    """

    num_blocks: int
    num_swap_blocks: int
    budget: BlockBudget
    max_model_len: int
    spill: SpillPlan | None = None


def plan_cache(settings: EngineSettings, loaded: Loaded) -> CachePlan:
    """Return the cache's plan.

    Raises:
        StartupError: Drafted tokens of this model could not be rolled back.
    """
    model = loaded.model
    layout = plan_layout(model.shape, settings.block_size, model.dtype, model.cache_dtype)
    return CachePlan(
        layout,
        layout.block_elements * model.cache_dtype.itemsize,
        *batch_size(settings, model.device),
        _speculation(settings, layout),
    )


def measure(settings: EngineSettings, loaded: Loaded, plan: CachePlan) -> int:
    """Return the bytes of a GPU's memory that the cache cannot use; 0 on a CPU.

    The largest step runs once, with its own cache. This also proves, before any request, that there
    is memory for it.
    """
    model = loaded.model
    tokens = min(plan.max_num_batched_tokens, settings.max_model_len or model.shape.max_position)
    # One extra block per group suffices, as the largest batch has two sequences.
    least = sum(plan.layout.sequence_blocks(tokens)) + len(plan.layout.groups)
    tensors = allocate(plan.layout, model, least, 0, loaded.leader)
    probe = Executor(model, tensors, loaded.leader, loaded.device_adapters)
    if loaded.on_gpu:  # a CPU has no peak to measure
        reset_peak(model.device)
        probe.execute(largest_batch(tokens, plan.max_num_seqs, plan.layout))
        torch.cuda.synchronize(model.device)
    return _memory_taken(probe, loaded, settings, plan) + (loaded.adapter_limit or 0)


def size_cache(settings: EngineSettings, loaded: Loaded, plan: CachePlan, taken: int) -> CacheSize:
    """Return the cache's size.

    Args:
        settings: The engine's settings.
        loaded: The model.
        plan: The cache's plan.
        taken: Bytes that the cache cannot use.

    Raises:
        StartupError: The cache does not fit.
    """
    # A draft model has the same number of blocks.
    draft_bytes = 0 if loaded.draft_model is None else loaded.draft_model.block_bytes
    blocks, swap_blocks = count_pool(
        *(settings, loaded.model, plan.block_bytes, taken, loaded.place), draft_bytes=draft_bytes
    )
    if loaded.leader is not None:
        blocks, swap_blocks = loaded.leader.count(blocks, swap_blocks)
    groups, spill, most = plan.layout.groups, None, sys.maxsize
    model, step_tokens = loaded.model, plan.max_num_batched_tokens
    spilling = plan_spill(
        *(settings, plan.layout, model.cache_dtype, model.device),
        num_blocks=blocks,
        step_tokens=step_tokens,
    )
    if spilling is not None:
        spill, group = spilling
        groups, most = (group,), spill.num_units * spill.unit_tokens + (group.kept or 0)
    budget = BlockBudget(blocks, groups, step_tokens)
    context = model.shape.max_position
    max_model_len = longest_sequence(settings, context, budget, most)
    if settings.max_model_len is None and max_model_len < context:
        log.warning("context limited by the cache", model=context, max_model_len=max_model_len)
    return CacheSize(blocks, swap_blocks, budget, max_model_len, spill)


def count_pool(
    settings: EngineSettings,
    loaded: LoadedForward,
    block_bytes: int,
    taken: int,
    place: RankPlace | None = None,
    *,
    draft_bytes: int = 0,
) -> tuple[int, int]:
    """Return the numbers of blocks that fit on the device and in swap space of this process.

    Args:
        settings: The engine's settings; their sizes are totals over all ranks.
        loaded: The model, or this rank's part.
        block_bytes: Bytes per block, or of this rank's part of one.
        taken: Bytes that the cache cannot use.
        place: The place of this rank among several.
        draft_bytes: Bytes on the device that each block needs in the draft model's cache.

    Raises:
        StartupError: They do not fit.
    """
    rank_settings, ranks_here = settings, 1
    if place is not None:
        gib = {"cache_memory": settings.cache_memory, "swap_space": settings.swap_space}
        shares = {name: size / place.size for name, size in gib.items() if size is not None}
        rank_settings, ranks_here = settings.model_copy(update=shares), place.local_size
    swap = count_swap_blocks(rank_settings, block_bytes)
    if settings.swap_space is None:  # a share of memory that the ranks of a machine share
        swap //= ranks_here
    blocks = count_blocks(
        rank_settings, loaded.device, block_bytes + draft_bytes, swap, taken=taken
    )
    if settings.num_blocks is None and settings.cache_memory is None:
        blocks = blocks // ranks_here if loaded.device.type == "cpu" else blocks
    return blocks, swap


def largest_batch(tokens: int, seqs: int, layout: CacheLayout) -> Batch:
    """Return the batch that needs the most memory: the one with the most logits.

    Args:
        tokens: Tokens computed; the maximum number of prompt tokens is scored.
        seqs: Sequences that sample a token.
        layout: The cache's layout.
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
        sampled = [Sequence(0, 0, [0] * size, size)] * seqs if not batch else []
        batch.rest.append(ScheduledSequence(group, sequence, 0, size, tables, sampled))
    return batch


def _memory_taken(
    probe: Executor, loaded: Loaded, settings: EngineSettings, plan: CachePlan
) -> int:
    """Return the bytes that the cache cannot use; 0 if the cache's size is set.

    On a GPU these are the peak of the largest step, without the probe's own cache, and the CUDA
    graphs.
    """
    is_set = settings.num_blocks is not None or settings.cache_memory is not None
    device = loaded.model.device
    if is_set or device.type != "cuda":
        return 0
    taken = peak_memory(device) - probe.cache.device.nbytes
    if not settings.cuda_graphs:
        return taken
    most = settings.max_model_len or loaded.model.shape.max_position
    blocks = memory_of(device).total // plan.block_bytes
    capacity = BlockBudget(blocks, probe.cache.layout.groups, most).capacity(most)
    taken += measure_recorded(probe, plan.graph_sizes, capacity, loaded.world)
    if loaded.draft_model is not None:
        taken += loaded.draft_model.measure_graphs(plan.max_num_seqs, plan.max_num_batched_tokens)
    return taken


def _speculation(settings: EngineSettings, layout: CacheLayout) -> Speculation | None:
    """Return the speculation that drafts tokens; None without drafts.

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
