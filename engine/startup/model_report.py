"""The memory and the checks of serving a model, from its config alone.

The checks, the cache's layout and its size use the startup's code, so an engine behaves as
reported. Only phases that need the weights are skipped: reading their files, and the self-check.
"""

from dataclasses import dataclass
from pathlib import Path

from octavo.common.kv_cache.layer_groups import BlockBudget, blocks_held
from octavo.common.models.checkpoint import check_checkpoint, check_config
from octavo.common.models.safetensors_files import weight_files
from octavo.common.resources import Memory
from octavo.engine.memory.cache_layout import CacheLayout, plan_layout
from octavo.engine.memory.cache_tensors import memory_of
from octavo.engine.models.checks.model_class import check_model_class
from octavo.engine.models.checks.weight_names import check_weights
from octavo.engine.models.load_empty import EmptyModel, load_empty
from octavo.engine.models.resolve_or_convert import resolve_config
from octavo.engine.models.weights_size import sizes_by_quantization, why_no_room
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build_embedder import read_purpose
from octavo.engine.startup.capacity import (
    StartupError,
    batch_size,
    count_blocks,
    count_swap_blocks,
    keeps_blocks,
    longest_sequence,
)
from octavo.engine.startup.embedder_report import EmbedderReport, report_embedder


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A layer group of a model's cache.

    Attributes:
        kind: "attention", "latent", "window", "chunk" or "state".
        reach: Tokens of a window or chunk; None for others.
        layers: Calls of attention, or states, in the group.
        block_size: Tokens per block; None for states.
        token_bytes: Bytes per kept token; None for states.
        sequence_bytes: Maximum bytes of a sequence of the maximum length.
    """

    kind: str
    reach: int | None
    layers: int
    block_size: int | None
    token_bytes: int | None
    sequence_bytes: int


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The needs of serving a model. Sizes are in bytes.

    Attributes:
        model: The model's name, as given.
        model_type: Its type in transformers.
        architecture: Its class.
        device: The device that would run it.
        dtype: The dtype of its weights.
        quantization: The scheme of its linear layers and experts, or a quantized checkpoint's.
        cache_dtype: The type of the KV cache.
        parameters: The number of its weights.
        weights: Estimated bytes of its weights.
        weights_by_quantization: The same for each quantization that the device supports.
        memory: Free bytes of the device's memory before the model is loaded.
        cache: Bytes of the KV cache.
        block_bytes: Bytes of a block.
        blocks: The number of blocks.
        context: Tokens of the model's context.
        max_model_len: Maximum tokens of a sequence.
        tokens: Tokens that fit into the cache; None if its use does not grow with tokens.
        sequences: Sequences of `max_model_len` tokens that fit into it.
        max_num_seqs: Maximum sequences in the running batch.
        groups: The layer groups of the cache.
        images: Whether it reads images.
    """

    model: str
    model_type: str
    architecture: str
    device: str
    dtype: str
    quantization: str
    cache_dtype: str
    parameters: int
    weights: int
    weights_by_quantization: dict[str, int]
    memory: int
    cache: int
    block_bytes: int
    blocks: int
    context: int
    max_model_len: int
    tokens: int | None
    sequences: int
    max_num_seqs: int
    groups: tuple[GroupReport, ...]
    images: bool


def report(settings: EngineSettings, memory: int | None = None) -> ModelReport | EmbedderReport:
    """Return a report of a model's memory needs.

    Args:
        settings: The engine's settings.
        memory: Bytes of memory for serving. Default: this machine's.

    Raises:
        StartupError: The settings conflict with each other, the model or the memory.
        UnsupportedModelError: The engine cannot serve the model.
        ModelError: The model's config cannot be found or read.
        OSError: A file cannot be opened.
    """
    directory = Path(resolve_config(settings.source, packed=keeps_blocks(settings)))
    embeds = settings.pooling is not None
    if weight_files(directory):
        check_checkpoint(directory, embeds=embeds)
    else:
        check_config(directory, embeds=embeds)
    if (plan := read_purpose(settings, directory)) is not None:
        return report_embedder(settings, directory, plan, memory)
    empty = load_checked(settings, directory)
    layout = plan_layout(empty.shape, settings.block_size, empty.dtype, empty.cache_dtype)
    block_bytes = layout.block_elements * empty.cache_dtype.itemsize
    seqs, batched = batch_size(settings, empty.device)
    stored = empty.stored
    of_vision = [] if empty.vision is None else empty.vision.weights
    weights = {
        scheme: size + sum(weight.nbytes for weight in of_vision)
        for scheme, size in sizes_by_quantization(empty.model, empty.device, stored).items()
    }
    taken = weights[settings.quantization]
    device = memory_of(empty.device) if memory is None else Memory(memory, memory)
    if why := why_no_room(weights, settings.quantization, device.available):
        raise StartupError(why)
    on_gpu = empty.device.type == "cuda"
    blocks = count_blocks(
        settings,
        empty.device,
        block_bytes,
        count_swap_blocks(settings, block_bytes) if on_gpu else 0,
        taken=taken,
        memory=device,
    )
    budget = BlockBudget(blocks, layout.groups, batched)
    longest = longest_sequence(settings, empty.shape.max_position, budget)
    return ModelReport(
        model=settings.model,
        model_type=empty.model.config.model_type,
        architecture=type(empty.model).__name__,
        device=empty.device.type,
        dtype=str(empty.dtype).removeprefix("torch."),
        quantization=settings.quantization if stored is None else stored.description,
        cache_dtype=str(empty.cache_dtype).removeprefix("torch."),
        parameters=sum(weight.numel() for weight in (*empty.model.parameters(), *of_vision)),
        weights=taken,
        weights_by_quantization=weights if stored is None else {stored.description: taken},
        memory=device.available,
        cache=blocks * block_bytes,
        block_bytes=block_bytes,
        blocks=blocks,
        context=empty.shape.max_position,
        max_model_len=longest,
        tokens=int(blocks / budget.growth) if budget.growth else None,
        sequences=blocks // max(1, blocks_held(layout.groups, longest, batched)),
        max_num_seqs=seqs,
        groups=group_reports(layout, block_bytes, longest, batched),
        images=empty.vision is not None,
    )


def load_checked(settings: EngineSettings, directory: Path) -> EmptyModel:
    """Create a directory's model without weights, after the startup's checks.

    Raises:
        ModelError: The engine cannot serve the model.
    """
    check_model_class(str(directory))
    if weight_files(directory):
        check_weights(str(directory))
    return load_empty(
        str(directory),
        dtype=settings.dtype,
        device=settings.device,
        block_size=settings.block_size,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_model_len=settings.max_model_len,
    )


def group_reports(
    layout: CacheLayout, block_bytes: int, num_tokens: int, step_tokens: int
) -> tuple[GroupReport, ...]:
    """Return a report of each layer group's blocks and tokens.

    Args:
        layout: The cache's layout.
        block_bytes: Bytes per block.
        num_tokens: Tokens of the longest sequence.
        step_tokens: Maximum tokens that a step computes.
    """
    places = [place.group for place in layout.places]
    places += [place.group for place in layout.states]
    return tuple(
        GroupReport(
            kind=_kind(layout, number),
            reach=group.window or group.chunk,
            layers=places.count(number),
            block_size=None if group.state_blocks else group.block_size,
            token_bytes=None if group.state_blocks else block_bytes // group.block_size,
            sequence_bytes=group.held(num_tokens, step_tokens) * block_bytes,
        )
        for number, group in enumerate(layout.groups)
    )


def _kind(layout: CacheLayout, number: int) -> str:
    """Return the kind of a group; see `GroupReport`."""
    group = layout.groups[number]
    if group.state_blocks:
        return "state"
    if group.bounded:
        return "chunk" if group.window is None else "window"
    return "latent" if layout.shapes[number].latent else "attention"
