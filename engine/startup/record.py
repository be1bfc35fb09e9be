"""Records an executor's steps as CUDA graphs, or measures their memory, if the device can."""

from functools import partial

import structlog

from octavo.engine.execution.cuda_graphs import Record, RecordingError, cuda_recorder
from octavo.engine.execution.executor import Executor
from octavo.engine.execution.graph_sizes import GraphSize
from octavo.engine.memory.cache_tensors import GIB, free_memory
from octavo.engine.parallel.world import World

log = structlog.get_logger(__name__)


def recorder(world: World | None) -> Record:
    """Return a recorder of steps.

    Args:
        world: The ranks that compute them; None without other ranks.

    Raises:
        RecordingError: The ranks communicate in ways that no graph has; the message names them.
    """
    if world is None:
        return cuda_recorder()
    if world.unrecordable is not None:
        raise RecordingError(world.unrecordable)
    return cuda_recorder(ranks=True)


def record(
    executor: Executor, sizes: list[GraphSize], max_model_len: int, world: World | None = None
) -> None:
    """Record steps on all ranks; log a warning if a device cannot record the model.

    Args:
        executor: The executor, warmed up.
        sizes: The sizes of steps.
        max_model_len: Maximum number of tokens of a sequence.
        world: The ranks; None without other ranks.

    Raises:
        RuntimeError: A step failed before it was recorded, so that other ranks wait for this one.
    """
    try:
        executor.record_graphs(sizes, max_model_len, recorder(world))
    except RuntimeError as error:
        if world is not None and not isinstance(error, RecordingError):
            raise
        log.warning("no CUDA graphs: steps launch each kernel, which is slower", error=str(error))


def measure_recorded(
    executor: Executor, sizes: list[GraphSize], max_model_len: int, world: World | None = None
) -> int:
    """Return the bytes on the device that `record` will take; 0 if it cannot record the model."""
    try:
        free = partial(free_memory, executor.device)
        taken = executor.measure_graphs(sizes, max_model_len, recorder(world), free)
    except RuntimeError as error:  # `record` logs it
        if world is not None and not isinstance(error, RecordingError):
            raise
        return 0
    log.info("CUDA graphs measured", gib=round(taken / GIB, 3))
    return taken
