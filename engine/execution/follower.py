"""The other ranks' side: they compute what rank 0 sends, and wait for nothing but its messages.

On a GPU a step returns while the device still computes it. Rank 0 alone reads what it samples, so
it decides how far the others are ahead of their devices.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
import torch

from octavo.engine.attention.operator import PagedStep, attending
from octavo.engine.compilation.load_forward import LoadedForward
from octavo.engine.execution.cuda_graphs import Record, RecordingError
from octavo.engine.execution.graph_sizes import GraphSize
from octavo.engine.execution.inputs import to_inputs
from octavo.engine.execution.rank_adapters import FollowerAdapters
from octavo.engine.execution.rank_images import receive_images
from octavo.engine.execution.rank_messages import Kind, RankStep, read_message, unpack_transfers
from octavo.engine.execution.recorded_steps import NO_GRAPH, RecordedSteps, agreeing
from octavo.engine.kv_cache import Transfers
from octavo.engine.memory.cache_tensors import CacheTensors, free_memory, reset_peak
from octavo.engine.models.linear.adapted_layers import applying
from octavo.engine.models.sharding.rank_forward import RankForward
from octavo.engine.parallel.watch import Watch
from octavo.engine.parallel.world import World

log = structlog.get_logger(__name__)


class Follower:
    """The other ranks' side.

    Args:
        world: The ranks.
        loaded: This rank's part of the model.
        allocate: Returns a cache of some blocks on the device and in swap space.
        count: Returns the numbers of blocks that fit on this rank; called with its latest cache,
            and the bytes that graphs take.
        recorder: Returns a recorder of steps; rank 0 asks for it only where it has one too.
        adapters: This rank's adapters; None if the engine takes none.
        told_to_stop: Returns whether this rank got a stop signal.
    """

    def __init__(
        self,
        world: World,
        loaded: LoadedForward,
        allocate: Callable[[int, int], CacheTensors],
        count: Callable[[CacheTensors, int], tuple[int, int]],
        *,
        recorder: Callable[[], Record],
        adapters: FollowerAdapters | None = None,
        told_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._world = world
        self._loaded = loaded
        self._allocate = allocate
        self._count = count
        self._recorder = recorder
        self._adapters = adapters
        self._told_to_stop = told_to_stop
        self._graph_bytes = 0
        self._set_cache(1, 0)

    def _set_cache(self, num_blocks: int, num_swap_blocks: int) -> None:
        loaded = self._loaded
        self._cache = self._allocate(num_blocks, num_swap_blocks)
        self._shapes = self._cache.layout.attention_shapes(
            loaded.dtype, loaded.cache_dtype, loaded.device
        )
        self._recorded = RecordedSteps(
            loaded, self._cache, self._shapes, takes_adapters=self._adapters is not None
        )

    @torch.inference_mode()
    def run(self) -> None:
        """Execute rank 0's messages until it sends stop."""
        watch: Watch | None = None
        while True:
            kind, numbers, packed = read_message(self._world.receive())
            match kind:
                case Kind.STOP:
                    if watch is not None:
                        watch.close()
                    return
                case Kind.WATCH:
                    watch = Watch(self._world, self._told_to_stop)
                case Kind.ALLOCATE:
                    self._set_cache(*numbers)
                    if self._loaded.device.type == "cuda":
                        reset_peak(self._loaded.device)  # the largest step may follow
                case Kind.COUNT:
                    self._world.least(*self._count(self._cache, self._graph_bytes))
                case Kind.RECORD | Kind.MEASURE:
                    self._record(kind, *numbers)
                case Kind.LOAD_ADAPTER if self._adapters is not None:
                    path = Path(bytes(numbers[1:]).decode())
                    self._world.tell_all(self._adapters.load(numbers[0], path))
                case Kind.DROP_ADAPTERS if self._adapters is not None:
                    self._adapters.drop(numbers)
                case Kind.COPY:
                    self._copy(unpack_transfers(numbers))
                case _:
                    self._compute(RankStep.read(numbers, packed))

    def _record(self, kind: Kind, max_model_len: int, *numbers: int) -> None:
        """Record steps, or measure what their graphs take."""
        width = len(GraphSize._fields)
        sizes = [GraphSize(*numbers[i : i + width]) for i in range(0, len(numbers), width)]
        record = agreeing(self._recorder(), self._world)
        try:
            if kind is Kind.RECORD:
                self._recorded.record(sizes, max_model_len, record)
            else:
                device = self._loaded.device
                self._graph_bytes = self._recorded.measure(
                    sizes, max_model_len, record, lambda: free_memory(device)
                )
        except RecordingError as error:
            log.info("no CUDA graphs", error=str(error))  # rank 0 warns

    def _copy(self, transfers: Transfers) -> None:
        self._cache.apply(transfers)
        self._cache.swapper.take_times()

    def _compute(self, step: RankStep) -> None:
        self._copy(step.transfers)
        inputs = to_inputs(
            step.arrays,
            device=self._loaded.device,
            shapes=self._shapes,
            longest=step.longest or None,
        )
        if step.filled:
            self._world.broadcast(inputs.token_ids)
        if step.adapters and self._adapters is not None:
            spans = list(zip(step.adapters, step.arrays.query_lens.tolist(), strict=True))
            adapters = self._adapters.lay_out(spans, step.arrays.rows)
            inputs = replace(inputs, adapters=adapters)
        run = None
        if step.has_images:
            assert self._loaded.eager is not None
            images, embeddings = receive_images(
                self._world, step.arrays, self._loaded.device, self._shapes
            )
            run = partial(self._loaded.eager.with_images, rows=images.rows, embeddings=embeddings)
            inputs = inputs.with_images(images)
        forward = self._loaded.forward
        assert isinstance(forward, RankForward)
        if step.graph != NO_GRAPH:
            columns = self._recorded.replay(step.graph, inputs)
        else:
            cache, scales = self._cache, self._loaded.kv_scales
            paged = PagedStep(inputs.groups, cache.layers, scales, cache.states)
            with attending(paged), applying(inputs.adapters):
                columns = forward.begin(inputs.token_ids, inputs.positions, inputs.logit_rows, run)
        (forward.most_likely if step.most_likely else forward.logits)(columns)
