"""Loads an engine's model, draft model and adapters, on its ranks."""

from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from octavo.engine.compilation.load_forward import LoadedForward, load_forward
from octavo.engine.execution.leader import Leader
from octavo.engine.lora.adapter import AdapterRegistry
from octavo.engine.lora.device_adapters import DeviceAdapters
from octavo.engine.lora.errors import AdapterError
from octavo.engine.memory.cache_tensors import GIB
from octavo.engine.models.device import choose_device
from octavo.engine.parallel.gpu_sums import share_gpus
from octavo.engine.parallel.place import RankPlace
from octavo.engine.parallel.served import GPUS
from octavo.engine.parallel.shared_sums import share_memory
from octavo.engine.parallel.world import World, join
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.capacity import StartupError
from octavo.engine.startup.draft_model import LoadedDraftModel
from octavo.engine.startup.rank_facts import rank_facts

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The loaded parts of an engine.

    Attributes:
        model: The model.
        place: The place of this rank; None without other ranks.
        leader: Sends steps to the other ranks; None without other ranks.
        draft_model: The draft model; None if there is none.
        adapters: The adapters that requests may name; None if the engine takes none.
        device_adapters: The device's adapters, still empty; None if the engine takes none.
    """

    model: LoadedForward
    place: RankPlace | None
    leader: Leader | None
    draft_model: LoadedDraftModel | None
    adapters: AdapterRegistry | None
    device_adapters: DeviceAdapters | None

    @property
    def world(self) -> World | None:
        """The ranks; None without other ranks."""
        return None if self.leader is None else self.leader.world

    @property
    def adapter_limit(self) -> int | None:
        """Bytes that adapters may take on the device; None without a limit."""
        return None if self.device_adapters is None else self.device_adapters.limit

    @property
    def on_gpu(self) -> bool:
        """Whether it computes on a GPU."""
        return self.model.device.type == "cuda"


def load(settings: EngineSettings, path: Path, place: RankPlace | None) -> Loaded:
    """Load the model, its draft model and its adapters.

    Args:
        settings: The engine's settings.
        path: The model's directory.
        place: The place of this rank among several.

    Raises:
        StartupError: The settings do not fit the model or the machine.
        RankError: Other ranks do not come, or run something else.
        UnsupportedModelError: The engine cannot serve the model.
        ModelError: The model cannot be read.
    """
    world = None if place is None else join_ranks(settings, path, place)
    leader = None if world is None else Leader(world)
    model = load_forward(settings, str(path), world)
    draft_model = None
    if settings.draft_model is not None:
        draft_model = LoadedDraftModel(settings, settings.draft_model, model.shape)
    adapters, on_device = make_adapters(settings, model) or (None, None)
    if adapters is not None:
        _load_adapters(settings, adapters, leader)
    return Loaded(model, place, leader, draft_model, adapters, on_device)


def join_ranks(settings: EngineSettings, path: Path, place: RankPlace) -> World:
    """Join the other ranks of an engine.

    Args:
        settings: The engine's settings.
        path: The model's directory.
        place: The place of this rank.

    Raises:
        RankError: Other ranks do not come, or run something else.
        StartupError: They cannot be reached, or the device does not support several ranks.
    """
    device = choose_device(settings.device)
    if device.type == "cpu" and torch.cuda.is_available():
        raise StartupError(
            "--device cpu with several ranks needs a process that sees no GPU: set"
            " CUDA_VISIBLE_DEVICES to nothing"
        )
    if device.type == "cuda" and settings.pipeline_parallel_size > 1:
        raise StartupError(f"--pipeline-parallel-size is above 1, but {GPUS.pipeline}")
    if device.type == "cuda" and place.local_size > torch.cuda.device_count():
        raise StartupError(
            f"this machine has {torch.cuda.device_count()} GPUs for {place.local_size} ranks: lower"
            " --tensor-parallel-size, or start ranks on more machines"
        )
    try:
        world = join(
            place,
            device,
            watch_seconds=settings.rank_timeout,
            stages=settings.pipeline_parallel_size,
            facts=rank_facts(settings, path),
        )
    except (RuntimeError, ValueError) as error:
        raise StartupError(f"the ranks do not find each other: {error}") from error
    if device.type == "cpu" and world.shared is None:
        share_memory(world)
    if device.type == "cuda" and world.one_shot is None:
        share_gpus(world, device)
    log.info("ranks joined", rank=place.rank, ranks=place.size)
    return world


def make_adapters(
    settings: EngineSettings, loaded: LoadedForward
) -> tuple[AdapterRegistry, DeviceAdapters] | None:
    """Return the registry of adapters and those of the device, both empty; None if it takes none.

    Only on a GPU adapters' memory is limited: on a CPU they are not copied.
    """
    if loaded.targets is None:
        return None
    limit = None if loaded.device.type == "cpu" else int(settings.adapter_memory * GIB)
    registry = AdapterRegistry(loaded.targets, settings.model_names, limit)
    return registry, DeviceAdapters(loaded.device, limit, loaded.targets.packed)


def _load_adapters(
    settings: EngineSettings, registry: AdapterRegistry, leader: Leader | None
) -> None:
    """Load the adapters of --lora on all ranks.

    Raises:
        StartupError: One of them cannot be served.
    """
    for name, path in settings.adapters.items():
        try:
            adapter = registry.read(name, Path(path))
            if leader is not None:
                leader.load_adapter(adapter)
            registry.add(adapter)
        except AdapterError as error:
            raise StartupError(f"--lora {name}: {error}") from error
        log.info("adapter loaded", adapter=name, path=path)
