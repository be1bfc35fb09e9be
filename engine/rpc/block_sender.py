"""Sends prefix blocks to other engines."""

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence

from octavo.common import rpc
from octavo.engine.core import EngineCore
from octavo.engine.kv_disk.reads import Bytes
from octavo.v1 import engine_pb2

MAX_READERS = 32
"""Maximum number of calls in progress."""
MAX_COPIES = 8
"""Maximum number of calls that hold copies of blocks at once."""
COPY_BYTES = 32 << 20
"""Bytes of blocks, at least one, that are copied at once for a call."""
PIECE_BYTES = 1 << 20
"""Maximum bytes of a message."""
MAX_KEYS, MAX_KEY_BYTES = 1 << 16, 64
RETRY_SECONDS = 1.0
WAIT_SECONDS = 10.0
"""Maximum time to wait for a block that is being computed."""
POLL_SECONDS = 0.005
"""Time between looks for it. Calls wait for the end of a step, so one is nearly always queued."""
SHARES_NONE = "this engine shares no blocks: that needs prefix caching, swap space and one rank"


class BlockSender:
    """Answers the calls of ReadBlocks.

    Attributes:
        reading: Number of calls in progress.

    Args:
        core: Copies blocks between steps.
        block_layout: Name of the blocks' layout; empty: none are sent.
        block_bytes: Bytes per block.
    """

    def __init__(self, core: EngineCore, block_layout: str, block_bytes: int) -> None:
        self._core = core
        self._block_layout = block_layout
        self._num_copied = max(1, COPY_BYTES // block_bytes)
        self._copies = asyncio.Semaphore(MAX_COPIES)
        self.reading = 0

    async def send(
        self, request: engine_pb2.ReadBlocksRequest
    ) -> AsyncGenerator[engine_pb2.ReadBlocksResponse, None]:
        """Yield the pieces of the leading blocks that memory has, or will have soon.

        Raises:
            RpcError: The call is invalid, of another layout, or one too many.
        """
        self._check(request)
        self.reading += 1
        try:
            keys, sent, last = request.keys, 0, time.monotonic()
            while sent < len(keys):
                async with self._copies:
                    blocks = await self._copy(keys[sent : sent + self._num_copied])
                    for block in blocks:
                        for piece in await asyncio.to_thread(_pieces, block):
                            yield piece
                sent += len(blocks)
                if blocks:
                    last = time.monotonic()
                elif request.wait and time.monotonic() < last + WAIT_SECONDS:
                    await asyncio.sleep(POLL_SECONDS)
                else:
                    return
        finally:
            self.reading -= 1

    def _check(self, request: engine_pb2.ReadBlocksRequest) -> None:
        if not 1 <= len(request.keys) <= MAX_KEYS or max(map(len, request.keys)) > MAX_KEY_BYTES:
            raise rpc.invalid(
                "keys", f"keys must be 1 to {MAX_KEYS} keys of at most {MAX_KEY_BYTES} bytes"
            )
        if not self._block_layout:
            raise rpc.precondition("block_layout", SHARES_NONE)
        if request.block_layout != self._block_layout:
            raise rpc.precondition(
                "block_layout",
                f"blocks here have the layout {self._block_layout}, not"
                f" {request.block_layout[:64]!r}: model, settings, device and version must match",
            )
        if self.reading >= MAX_READERS:
            raise rpc.exhausted(f"{MAX_READERS} engines read blocks already", RETRY_SECONDS)

    async def _copy(self, keys: Sequence[bytes]) -> list[Callable[[], Bytes]]:
        """Have the core copy blocks between two steps."""
        loop, read_ahead = asyncio.get_running_loop(), self._core.read_ahead
        assert read_ahead is not None, "it has a block layout"
        done: asyncio.Future[list[Callable[[], Bytes]]] = loop.create_future()

        def tell(blocks: list[Callable[[], Bytes]]) -> None:
            if not done.done():  # cancelled
                done.set_result(blocks)

        def copy() -> None:
            loop.call_soon_threadsafe(tell, read_ahead.copy(keys))

        self._core.call(copy)
        return await done


def _pieces(copied: Callable[[], Bytes]) -> list[engine_pb2.ReadBlocksResponse]:
    """Return the messages of a block, once its copy is done."""
    contents = copied()
    pieces = [
        engine_pb2.ReadBlocksResponse(data=contents[i : i + PIECE_BYTES].tobytes())
        for i in range(0, len(contents), PIECE_BYTES)
    ]
    pieces[-1].checksum = zlib.crc32(contents.data)
    return pieces
