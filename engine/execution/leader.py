"""Rank 0's side of several ranks.

Every rank has its part of the model and of each block, so block numbers mean the same on all ranks.
Before each step, rank 0 sends one message: block copies, token ids, positions, slots and block
tables. Then all ranks copy and compute simultaneously.
"""

from collections.abc import Sequence

from octavo.engine.execution.cuda_graphs import Record
from octavo.engine.execution.graph_sizes import GraphSize
from octavo.engine.execution.rank_adapters import AdapterNumbers, mark
from octavo.engine.execution.rank_messages import Kind, RankStep, message_of, pack_transfers
from octavo.engine.execution.recorded_steps import NO_GRAPH, agreeing
from octavo.engine.execution.step_arrays import StepArrays
from octavo.engine.kv_cache import Transfers
from octavo.engine.lora.adapter import Adapter
from octavo.engine.lora.errors import AdapterError
from octavo.engine.parallel.watch import Watch
from octavo.engine.parallel.world import World


class Leader:
    """Rank 0's side.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._watch: Watch | None = None
        self._adapters = AdapterNumbers()

    def allocate(self, num_blocks: int, num_swap_blocks: int) -> None:
        """Make the other ranks allocate their caches."""
        self._send(Kind.ALLOCATE, [num_blocks, num_swap_blocks])

    def count(self, num_blocks: int, num_swap_blocks: int) -> list[int]:
        """Return the minimum over ranks of the blocks that fit on the device and in swap space."""
        self._send(Kind.COUNT)
        return self.world.least(num_blocks, num_swap_blocks)

    def record(
        self, kind: Kind, sizes: Sequence[GraphSize], max_model_len: int, record: Record
    ) -> Record:
        """Make the other ranks record steps; this rank must record the same right afterwards.

        Args:
            kind: `RECORD`, or `MEASURE` for ranks that keep no graphs.
            sizes: The sizes of steps.
            max_model_len: Maximum number of tokens of a sequence.
            record: This rank's recorder.

        Returns:
            The recorder for this rank.
        """
        self._send(kind, [max_model_len, *(number for size in sizes for number in size)])
        return agreeing(record, self.world)

    def copy(self, transfers: Transfers) -> None:
        """Make the other ranks copy blocks."""
        self._send(Kind.COPY, pack_transfers(transfers))

    def run(
        self,
        transfers: Transfers,
        arrays: StepArrays,
        *,
        most_likely: bool,
        adapters: Sequence[object] = (),
        graph: int = NO_GRAPH,
        filled: bool = False,
        longest: int | None = None,
        has_images: bool = False,
    ) -> None:
        """Make the other ranks compute a step; this rank must compute it right afterwards.

        Args:
            transfers: The step's copies.
            arrays: The step's arrays.
            most_likely: Whether to return the most likely tokens instead of logits.
            adapters: Each sequence's adapter; empty if none has one.
            graph: See `RankStep`.
            filled: See `RankStep`.
            longest: See `to_inputs`.
            has_images: See `RankStep`.
        """
        if dropped := self._adapters.take_dropped():
            self._send(Kind.DROP_ADAPTERS, dropped)
        step = RankStep(
            transfers,
            arrays,
            most_likely,
            graph,
            filled,
            longest or 0,
            list(map(self._adapters.find, adapters)),
            has_images,
        )
        self.world.send(step.message())

    def load_adapter(self, adapter: Adapter) -> None:
        """Make the other ranks read an adapter; steps wait meanwhile.

        Raises:
            AdapterError: One of them cannot serve it, or finds other files.
        """
        number = self._adapters.add(adapter)
        self._send(Kind.LOAD_ADAPTER, [number, *str(adapter.path).encode()])
        for rank, (found,) in enumerate(self.world.tell_all(mark(adapter))):
            if found != mark(adapter):
                what = "has other files there" if found else "cannot serve it: see its log"
                raise AdapterError(f"{adapter.path}: rank {rank} {what}")

    def watch(self) -> None:
        """Let all ranks watch each other from now on; see `octavo.engine.parallel.watch`."""
        self._send(Kind.WATCH)
        self._watch = Watch(self.world)

    def stop(self) -> None:
        """Make the other ranks end."""
        if self._watch is not None:
            self._watch.close()
        self._send(Kind.STOP)
        self.world.flush()

    def _send(self, kind: Kind, numbers: Sequence[int] = ()) -> None:
        self.world.send(message_of(kind, numbers))
