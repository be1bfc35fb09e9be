"""Copies blocks between the device's cache and swap space in host memory.

On a GPU the copies use staging buffers and a separate stream:

    compute   ... gather | model's step ...               wait, scatter | model's step ...
    side                 wait, copy to the host ...  copy to the device |

So a swap-out overlaps the step, which may overwrite the blocks at once, and the step only waits for
swap-ins. The side stream copies in the order of the calls, so each read of swap space sees earlier
writes. Pairs are sorted by swap block: adjacent blocks cross the bus in one copy, and the block
pool allocates adjacent blocks if it can. Staging buffers in host memory would always make it one
copy, but the host would have to move each block between them and swap space, and swap-ins would
wait for that. A buffer is reused after its last user's event. The host never waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kernels.ops import swap_blocks

if TYPE_CHECKING:  # so that benchmarks can time swaps with torch alone
    from octavo.engine.kv_cache.transfers import BlockPairs

Bytes = NDArray[np.uint8]

STAGING_BYTES = 128 << 20
"""Maximum size of each of the two staging buffers: larger swap-outs make the compute stream wait
for the bus."""


class Swapper:
    """Does a step's swaps, in the order of the calls; on a CPU, a copy is done on return."""

    def __init__(self, device: torch.Tensor, swap: torch.Tensor) -> None:
        self._device = device
        self._swap = swap
        self._times: list[tuple[int, float]] = []

    def swap_out(self, pairs: BlockPairs) -> None:
        """Copy (device block, swap block) pairs. The device blocks may be overwritten at once."""
        self._copy(self._device, self._swap, pairs)

    def swap_in(self, pairs: BlockPairs) -> None:
        """Copy (swap block, device block) pairs."""
        self._copy(self._swap, self._device, pairs)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, pairs: BlockPairs) -> None:
        began = time.perf_counter()
        swap_blocks(source, target, torch.tensor(pairs))
        self._times.append((len(pairs), time.perf_counter() - began))

    def take_times(self) -> list[tuple[int, float]]:
        """Return blocks and seconds of each copy that ended since the last call."""
        times, self._times = self._times, []
        return times

    def copy_out(self, block: int) -> Callable[[], Bytes]:
        """Copy a device block to new host memory.

        Returns:
            A function that waits for the copy and returns the block's bytes, for any thread.
        """
        contents = _bytes_of(self._device[block].clone())
        return lambda: contents

    def copy_kept(self, block: int) -> Callable[[], Bytes]:
        """Copy a swap block to new host memory; see `copy_out`."""
        contents = _bytes_of(self._swap[block].clone())
        return lambda: contents

    def fill(self, block: int, contents: Bytes) -> None:
        """Overwrite a swap block, which no copy of this step may use."""
        _bytes_of(self._swap[block])[:] = contents


class CudaStream:
    """A stream, which runs its work on a GPU in order."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Use `stream`, or always the current stream if it is None."""
        self._device = device
        self._fixed_stream = stream

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._fixed_stream or torch.cuda.current_stream(self._device)

    def run(self, work: Callable[[], None]) -> None:
        """Run `work`, which launches kernels or copies, on this stream."""
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> torch.cuda.Event:
        """Return an event for the end of all work so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Let later work wait for `event`."""
        self._stream.wait_event(event)


@dataclass(slots=True)
class _Buffer:
    """A staging buffer on the device, and the event after which it may be reused."""

    blocks: torch.Tensor
    free: torch.cuda.Event


class StreamSwapper(Swapper):
    """Swaps on a GPU: copies overlap the model; see this module's text."""

    def __init__(
        self,
        device: torch.Tensor,
        swap: torch.Tensor,
        *,
        compute: CudaStream,
        side: CudaStream,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """Allocate the buffers.

        Args:
            device: `[num_blocks, ...]`, the cache on the GPU.
            swap: `[num_swap_blocks, ...]` in pinned memory, for swaps alone.
            compute: The model's stream.
            side: A stream that nothing else uses.
            staging_bytes: Maximum size of a buffer, which holds at least one block.
        """
        super().__init__(device, swap)
        self._compute = compute
        self._side = side
        self._capacity = _capacity(len(swap), device[0].nbytes, staging_bytes)
        self._buffers = [
            _Buffer(device.new_empty((self._capacity, *device.shape[1:])), compute.record())
            for _ in range(2)
        ]
        self._running: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def swap_out(self, pairs: BlockPairs) -> None:
        """Copy (device block, swap block) pairs. The device blocks may be overwritten at once."""
        for chunk, buffer in self._chunks(sorted(pairs, key=itemgetter(1))):
            gathered = torch.tensor([(block, i) for i, (block, _) in enumerate(chunk)])
            self._compute.wait(buffer.free)
            self._compute.run(partial(swap_blocks, self._device, buffer.blocks, gathered))
            self._side.wait(self._compute.record())
            places = [block for _, block in chunk]
            buffer.free = self._carry(_unload, buffer, places)

    def swap_in(self, pairs: BlockPairs) -> None:
        """Copy (swap block, device block) pairs; the compute stream waits for them."""
        for chunk, buffer in self._chunks(sorted(pairs)):
            self._side.wait(buffer.free)
            places = [block for block, _ in chunk]
            arrived = self._carry(_load, buffer, places)
            self._compute.wait(arrived)
            scattered = torch.tensor([(i, block) for i, (_, block) in enumerate(chunk)])
            self._compute.run(partial(swap_blocks, buffer.blocks, self._device, scattered))
            buffer.free = self._compute.record()

    def _chunks(self, pairs: BlockPairs) -> Iterator[tuple[BlockPairs, _Buffer]]:
        """Yield pairs that fit into a buffer, with the least recently used buffer."""
        for first in range(0, len(pairs), self._capacity):
            buffer = self._buffers.pop(0)
            self._buffers.append(buffer)
            yield pairs[first : first + self._capacity], buffer

    def _carry(
        self,
        copy: Callable[[torch.Tensor, torch.Tensor, list[int]], None],
        buffer: _Buffer,
        places: list[int],
    ) -> torch.cuda.Event:
        """Launch a copy over the bus on the side stream; return the event of its end."""
        began = self._side.record()
        self._side.run(partial(copy, buffer.blocks, self._swap, places))
        ended = self._side.record()
        self._running.append((len(places), began, ended))
        return ended

    def take_times(self) -> list[tuple[int, float]]:
        """Return them, without waiting for running copies."""
        times = []
        while self._running and self._running[0][2].query():  # type: ignore[no-untyped-call]
            blocks, began, ended = self._running.popleft()
            times.append((blocks, began.elapsed_time(ended) / 1e3))
        return times

    def copy_out(self, block: int) -> Callable[[], Bytes]:
        """Copy a device block to host memory, before later work on the compute stream."""
        source = self._device[block]
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self._compute.run(partial(_copy, copy, source))
        copied = self._compute.record()

        def wait() -> Bytes:
            copied.synchronize()
            return _bytes_of(copy)

        return wait

    def copy_kept(self, block: int) -> Callable[[], Bytes]:
        """Copy a swap block, once the copies launched so far are done."""
        self._side.record().synchronize()
        return super().copy_kept(block)

    def fill(self, block: int, contents: Bytes) -> None:
        """Overwrite a swap block, once the copies launched so far are done."""
        self._side.record().synchronize()
        _bytes_of(self._swap[block])[:] = contents


def _bytes_of(block: torch.Tensor) -> Bytes:
    """Return a view of a block in host memory."""
    contents: Bytes = block.view(torch.uint8).numpy()
    return contents


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _capacity(num_swap_blocks: int, block_bytes: int, staging_bytes: int) -> int:
    """Return the number of blocks that a buffer holds."""
    return min(num_swap_blocks, max(1, staging_bytes // block_bytes))


def staging_memory(num_swap_blocks: int, block_bytes: int) -> int:
    """Return the bytes that `make_swapper` allocates on a GPU."""
    return 2 * _capacity(num_swap_blocks, block_bytes, STAGING_BYTES) * block_bytes


def _unload(buffer: torch.Tensor, swap: torch.Tensor, places: list[int]) -> None:
    """Copy a buffer's blocks to swap blocks, adjacent ones in one copy."""
    for run, place in _runs(places):
        swap[place : place + len(run)].copy_(buffer[run.start : run.stop], non_blocking=True)


def _load(buffer: torch.Tensor, swap: torch.Tensor, places: list[int]) -> None:
    """Copy swap blocks to a buffer, adjacent ones in one copy."""
    for run, place in _runs(places):
        buffer[run.start : run.stop].copy_(swap[place : place + len(run)], non_blocking=True)


def _runs(places: list[int]) -> Iterator[tuple[range, int]]:
    """Yield the indices and first number of each run of consecutive numbers in sorted `places`."""
    first = 0
    for i in range(1, len(places) + 1):
        if i == len(places) or places[i] != places[i - 1] + 1:
            yield range(first, i), places[first]
            first = i


def make_swapper(device: torch.Tensor, swap: torch.Tensor) -> Swapper:
    """Return the swapper for the device of `device`."""
    if device.device.type != "cuda":
        return Swapper(device, swap)
    side = torch.cuda.Stream(device.device)  # type: ignore[no-untyped-call]
    return StreamSwapper(
        device,
        swap,
        compute=CudaStream(device.device),
        side=CudaStream(device.device, side),
    )
