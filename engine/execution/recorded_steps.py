"""The recorded steps of one rank: its graphs by number, so that all ranks replay the same.

With several ranks each records the same sizes in the same order, since the sums of a step are in
its graph and must meet those of the other ranks. Rank 0 chooses a step's graph. The others replay
the graph of that number and look for none themselves.
"""

from collections.abc import Callable, Sequence

import structlog
import torch

from octavo.engine.compilation.load_forward import LoadedForward
from octavo.engine.execution.cuda_graphs import (
    Record,
    RecordingError,
    Replay,
    StepGraphs,
    graph_memory,
)
from octavo.engine.execution.graph_sizes import GraphSize
from octavo.engine.execution.inputs import StepInputs
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.models.sharding.rank_forward import RankForward
from octavo.engine.parallel.world import World
from octavo.kernels.metadata import AttentionShape

NO_GRAPH = 0
"""The number of a step that is launched kernel by kernel."""

log = structlog.get_logger(__name__)


class RecordedSteps:
    """The graphs of a model's steps, without adapters and, if the model takes any, with adapters.

    Args:
        loaded: The model, or this rank's part of it.
        cache: The cache's tensors.
        shapes: Shape of each layer group's attention; None for states.
        takes_adapters: Whether steps may have adapters.
    """

    def __init__(
        self,
        loaded: LoadedForward,
        cache: CacheTensors,
        shapes: Sequence[AttentionShape | None],
        *,
        takes_adapters: bool,
    ) -> None:
        self._loaded = loaded
        self._cache = cache
        self._shapes = shapes
        self._takes_adapters = takes_adapters
        self._sizes: list[GraphSize] = []
        self._graphs: list[StepGraphs] = []

    def record(self, sizes: list[GraphSize], max_model_len: int, record: Record) -> None:
        """Record steps, to replay them from now on; see `cuda_graphs`.

        Args:
            sizes: The sizes; see `graph_sizes`.
            max_model_len: Maximum number of tokens of a sequence.
            record: The recorder of steps.

        Raises:
            RecordingError: The device cannot record the model.
        """
        self._graphs = self._record(sizes, max_model_len, record)
        self._sizes = sizes

    def measure(
        self, sizes: list[GraphSize], max_model_len: int, record: Record, free: Callable[[], int]
    ) -> int:
        """Return the bytes that `record` will take on the device; keep no graphs.

        Args:
            sizes: See `record`.
            max_model_len: See `record`.
            record: See `record`.
            free: Returns the device's free bytes.

        Raises:
            RecordingError: The device cannot record the model.
        """
        return graph_memory(
            sizes, lambda some, record: self._record(some, max_model_len, record), record, free
        )

    def choose(self, inputs: StepInputs) -> int:
        """Return the number of the graph for a step; `NO_GRAPH` if none fits."""
        kind = int(inputs.adapters is not None)
        if kind >= len(self._graphs) or inputs.images is not None:
            return NO_GRAPH
        size = self._graphs[kind].choose(inputs)
        return NO_GRAPH if size is None else 1 + kind * len(self._sizes) + self._sizes.index(size)

    def replay(self, number: int, inputs: StepInputs) -> torch.Tensor:
        """Return a step's logits, or this rank's columns of them; the next step overwrites them.

        Args:
            number: The graph's number from `choose`, of this rank or of rank 0.
            inputs: The step's inputs.

        Raises:
            RuntimeError: There is no such graph here, so that the ranks' sums could not meet.
        """
        kind, place = divmod(number - 1, max(1, len(self._sizes)))
        if not 0 <= kind < len(self._graphs):
            raise RuntimeError(f"rank 0 replays graph {number}, which this rank has not recorded")
        return self._graphs[kind].replay(self._sizes[place], inputs)

    def _record(
        self, sizes: list[GraphSize], max_model_len: int, record: Record
    ) -> list[StepGraphs]:
        loaded, cache = self._loaded, self._cache
        forward = loaded.forward
        if isinstance(forward, RankForward):
            forward = forward.begin  # its results are gathered behind the graph
        adapted_layers: list[int | None] = [None]
        if self._takes_adapters and loaded.targets is not None:
            adapted_layers.append(len(loaded.targets.make_records()))
        return [
            StepGraphs(
                forward,
                cache.layers,
                loaded.kv_scales,
                cache.states,
                sizes=sizes,
                widths=cache.layout.sequence_blocks(max_model_len),
                max_model_len=max_model_len,
                device=loaded.device,
                shapes=self._shapes,
                record=record,
                adapted_layers=layers,
            )
            for layers in adapted_layers
        ]


def agreeing(record: Record, world: World) -> Record:
    """Return a recorder that fails on all ranks if it fails on one.

    Only the recording itself may fail so. A rank that fails in the runs before it ends, as it would
    in any step: the others are in the middle of that run.

    Args:
        record: This rank's recorder.
        world: The ranks; all of them record the same steps in the same order.
    """

    def record_together(work: Replay) -> Replay:
        failure, replay = RecordingError("another rank cannot record a step"), None
        try:
            replay = record(work)
        except RecordingError as error:
            failure = error
        (everywhere,) = world.least(int(replay is not None))
        if replay is None or not everywhere:
            raise failure
        return replay

    return record_together
