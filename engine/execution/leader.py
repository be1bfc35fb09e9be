"""The messages from rank 0 to the other ranks, and their work.

Every rank has its part of the model and of each block, so block numbers mean the same on all ranks.
Before each step, rank 0 sends one message of numbers: block copies, token ids, positions, slots and
block tables. Then all ranks copy and compute simultaneously.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from octavo.engine.attention.operator import PagedStep, attending
from octavo.engine.compilation.load_forward import LoadedForward
from octavo.engine.execution.inputs import StepArrays, to_inputs
from octavo.engine.execution.rank_adapters import AdapterNumbers, FollowerAdapters, mark
from octavo.engine.kv_cache import Transfers
from octavo.engine.lora.adapter import Adapter
from octavo.engine.lora.errors import AdapterError
from octavo.engine.memory.cache_tensors import CacheTensors, reset_peak
from octavo.engine.models.linear.adapted_layers import applying
from octavo.engine.models.sharding.rank_forward import RankForward
from octavo.engine.parallel.watch import Watch
from octavo.engine.parallel.world import World


class Kind(IntEnum):
    """The type of a message."""

    ALLOCATE = 0
    COUNT = 1
    COPY = 2
    LOGITS = 3
    MOST_LIKELY = 4
    WATCH = 5
    STOP = 6
    LOAD_ADAPTER = 7
    DROP_ADAPTERS = 8


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
        self._send(Kind.COUNT, [])
        return self.world.least(num_blocks, num_swap_blocks)

    def copy(self, transfers: Transfers) -> None:
        """Make the other ranks copy blocks."""
        self._send(Kind.COPY, _pack_transfers(transfers))

    def run(
        self,
        transfers: Transfers,
        arrays: StepArrays,
        *,
        most_likely: bool,
        adapters: Sequence[object] = (),
        longest: int | None = None,
    ) -> None:
        """Make the other ranks compute a step; this rank must compute it right afterwards.

        Args:
            transfers: The step's copies.
            arrays: The step's arrays.
            most_likely: Whether to return the most likely tokens instead of logits.
            adapters: Each sequence's adapter; empty if none has one.
            longest: See `to_inputs`.
        """
        if dropped := self._adapters.take_dropped():
            self._send(Kind.DROP_ADAPTERS, dropped)
        kind = Kind.MOST_LIKELY if most_likely else Kind.LOGITS
        numbers = [longest or 0, len(adapters), *map(self._adapters.find, adapters)]
        self._send(kind, _pack_transfers(transfers), numbers, pack(arrays))

    def load_adapter(self, adapter: Adapter) -> None:
        """Make the other ranks read an adapter; steps wait meanwhile.

        Raises:
            AdapterError: One of them cannot serve it, or finds other files.
        """
        number = self._adapters.add(adapter)
        self._send(Kind.LOAD_ADAPTER, [number], list(str(adapter.path).encode()))
        for rank, (found,) in enumerate(self.world.tell_all(mark(adapter))):
            if found != mark(adapter):
                what = "has other files there" if found else "cannot serve it: see its log"
                raise AdapterError(f"{adapter.path}: rank {rank} {what}")

    def watch(self) -> None:
        """Let all ranks watch each other from now on; see `octavo.engine.parallel.watch`."""
        self._send(Kind.WATCH, [])
        self._watch = Watch(self.world)

    def stop(self) -> None:
        """Make the other ranks end."""
        if self._watch is not None:
            self._watch.close()
        self._send(Kind.STOP, [])
        self.world.flush()

    def _send(self, kind: Kind, *parts: Sequence[int] | np.ndarray) -> None:
        self.world.send(np.concatenate([np.array([kind]), *map(_numbers, parts)]))


def _numbers(part: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(part, np.int64)


def _pack_transfers(transfers: Transfers) -> list[int]:
    pairs = transfers.swap_out, transfers.swap_in, transfers.copies
    return [*map(len, pairs), *chain.from_iterable(chain(*pairs))]


def _take_transfers(numbers: np.ndarray) -> tuple[Transfers, np.ndarray]:
    """Return the copies at the beginning of a message, and the rest."""
    counts, at = numbers[:3].tolist(), 3
    transfers = []
    for count in counts:
        pairs = numbers[at : at + 2 * count].reshape(-1, 2).tolist()
        transfers.append([(source, target) for source, target in pairs])
        at += 2 * count
    return Transfers(*transfers), numbers[at:]


def pack(arrays: StepArrays) -> np.ndarray:
    """Return a step's arrays as one array of int64."""
    widths = [table.shape[1] for table in arrays.tables]
    head = [*arrays.laid.shape, len(arrays.query_lens), len(arrays.rows), *widths]
    flat = (arrays.laid, arrays.query_starts, arrays.query_lens, arrays.seq_lens, arrays.rows)
    return np.concatenate([_numbers(head), *(_numbers(a).ravel() for a in (*flat, *arrays.tables))])


def unpack(numbers: np.ndarray) -> StepArrays:
    """Return the arrays from the result of `pack`."""
    lanes, tokens, seqs, rows = numbers[:4].tolist()
    widths = numbers[4 : 4 + lanes - 2].tolist()
    parts = _take(
        numbers[4 + len(widths) :],
        [lanes * tokens, seqs + 1, seqs, seqs, rows, *(seqs * width for width in widths)],
    )
    laid, starts, query_lens, seq_lens, wanted, *tables = parts
    return StepArrays(
        laid.reshape(lanes, tokens),
        starts.astype(np.int32),
        query_lens.astype(np.int32),
        seq_lens.astype(np.int32),
        wanted,
        [
            table.reshape(seqs, width).astype(np.int32)
            for table, width in zip(tables, widths, strict=True)
        ],
    )


def _take(numbers: np.ndarray, counts: Sequence[int]) -> Iterator[np.ndarray]:
    at = 0
    for count in counts:
        yield numbers[at : at + count]
        at += count


class Follower:
    """The other ranks' side.

    Args:
        world: The ranks.
        loaded: This rank's part of the model.
        allocate: Returns a cache of some blocks on the device and in swap space.
        count: Returns the numbers of blocks that fit on this rank; called with its latest cache.
        adapters: This rank's adapters; None if the engine takes none.
        told_to_stop: Returns whether this rank got a stop signal.
    """

    def __init__(
        self,
        world: World,
        loaded: LoadedForward,
        allocate: Callable[[int, int], CacheTensors],
        count: Callable[[CacheTensors], tuple[int, int]],
        *,
        adapters: FollowerAdapters | None = None,
        told_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._world = world
        self._loaded = loaded
        self._allocate = allocate
        self._count = count
        self._adapters = adapters
        self._told_to_stop = told_to_stop
        self._cache = allocate(1, 0)
        self._shapes = self._cache.layout.attention_shapes(
            loaded.dtype, loaded.cache_dtype, loaded.device
        )

    @torch.inference_mode()
    def run(self) -> None:
        """Execute rank 0's messages until it sends stop."""
        watch: Watch | None = None
        while True:
            numbers = self._world.receive()
            kind, rest = Kind(int(numbers[0])), numbers[1:]
            match kind:
                case Kind.STOP:
                    if watch is not None:
                        watch.close()
                    return
                case Kind.WATCH:
                    watch = Watch(self._world, self._told_to_stop)
                case Kind.ALLOCATE:
                    self._cache = self._allocate(*rest.tolist())
                    if self._loaded.device.type == "cuda":
                        reset_peak(self._loaded.device)  # the largest step may follow
                case Kind.COUNT:
                    self._world.least(*self._count(self._cache))
                case Kind.LOAD_ADAPTER if self._adapters is not None:
                    path = Path(bytes(rest[1:].tolist()).decode())
                    self._world.tell_all(self._adapters.load(int(rest[0]), path))
                case Kind.DROP_ADAPTERS if self._adapters is not None:
                    self._adapters.drop(rest.tolist())
                case _:
                    self._compute(kind, rest)

    def _compute(self, kind: Kind, numbers: np.ndarray) -> None:
        transfers, rest = _take_transfers(numbers)
        self._cache.apply(transfers)
        self._cache.swapper.take_times()
        if kind is Kind.COPY:
            return
        longest, adapted = rest[:2].tolist()
        numbers, arrays = rest[2 : 2 + adapted].tolist(), unpack(rest[2 + adapted :])
        inputs = to_inputs(
            arrays, device=self._loaded.device, shapes=self._shapes, longest=longest or None
        )
        adapters = None
        if adapted and self._adapters is not None:
            spans = list(zip(numbers, arrays.query_lens.tolist(), strict=True))
            adapters = self._adapters.lay_out(spans, arrays.rows)
        cache, scales = self._cache, self._loaded.kv_scales
        arguments = inputs.token_ids, inputs.positions, inputs.logit_rows
        forward = self._loaded.forward
        assert isinstance(forward, RankForward)
        step = PagedStep(inputs.groups, cache.layers, scales, cache.states)
        with attending(step), applying(adapters):
            columns = forward.begin(*arguments)
        (forward.most_likely if kind is Kind.MOST_LIKELY else forward.logits)(columns)
