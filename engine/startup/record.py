"""Records an executor's steps as CUDA graphs, or measures their memory, if the device can."""

from functools import partial

import structlog

from octavo.engine.execution.cuda_graphs import cuda_recorder
from octavo.engine.execution.executor import Executor
from octavo.engine.execution.graph_sizes import GraphSize
from octavo.engine.memory.cache_tensors import GIB, free_memory

log = structlog.get_logger(__name__)


def record(executor: Executor, sizes: list[GraphSize], max_model_len: int) -> None:
    """Record steps; log a warning if the device cannot record the model.

    Args:
        executor: The executor, warmed up.
        sizes: The sizes of steps.
        max_model_len: Maximum number of tokens of a sequence.
    """
    try:
        executor.record_graphs(sizes, max_model_len, cuda_recorder())
    except RuntimeError as error:
        log.warning("no CUDA graphs: steps launch each kernel, which is slower", error=str(error))


def measure_recorded(executor: Executor, sizes: list[GraphSize], max_model_len: int) -> int:
    """Return the bytes on the device that `record` will take; 0 if it cannot record the model."""
    try:
        free = partial(free_memory, executor.device)
        taken = executor.measure_graphs(sizes, max_model_len, cuda_recorder(), free)
    except RuntimeError:  # `record` logs it
        return 0
    log.info("CUDA graphs measured", gib=round(taken / GIB, 3))
    return taken
