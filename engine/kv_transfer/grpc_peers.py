"""Reads blocks of other engines over gRPC."""

import zlib
from collections.abc import Generator, Iterable
from functools import lru_cache, partial

import grpc
import numpy as np
import structlog

from octavo.common import tls
from octavo.common.proxies import NO_PROXY
from octavo.common.tls import Tls
from octavo.engine.kv_disk.reads import Bytes, Rate, Read, Reads
from octavo.v1 import engine_pb2, engine_pb2_grpc

log = structlog.get_logger(__name__)

READERS = 8
"""Maximum number of concurrent reads, one per request."""
# With its own subchannels, a new read never waits for an earlier one's backoff.
_OPTIONS = [NO_PROXY, ("grpc.use_local_subchannel_pool", 1)]
MAX_PEERS = 256
"""Number of engines whose speed is remembered."""


class GrpcPeers:
    """The other engines, by their address.

    Args:
        block_layout: The layout that they must have too.
        block_bytes: Bytes per block.
        tls: TLS files of the connections; None: plaintext.

    Attributes:
        reads: Reads their blocks.
    """

    def __init__(self, block_layout: str, block_bytes: int, tls: Tls | None) -> None:
        self.reads = Reads("kv-peer", READERS)
        self.source = lru_cache(MAX_PEERS)(partial(GrpcPeer, block_layout, block_bytes, tls))


class GrpcPeer:
    """Another engine as a source of blocks.

    Attributes:
        rate: The speed of reading from it.
    """

    def __init__(self, block_layout: str, block_bytes: int, tls: Tls | None, address: str) -> None:
        self._block_layout = block_layout
        self._tls = tls
        self._address = address
        self.rate = Rate(block_bytes)

    def contents(self, read: Read) -> Generator[Bytes, None, None]:
        """Yield the contents of blocks; see `Source`.

        A connection for each read uses the current certificates, and knows no earlier failure.
        """
        request = engine_pb2.ReadBlocksRequest(
            block_layout=self._block_layout, keys=read.keys, wait=read.follows
        )
        try:
            with self._open() as channel:
                stub = engine_pb2_grpc.EngineServiceStub(channel)
                call = stub.ReadBlocks(request)
                read.stop = call.cancel
                if not read.ended:  # before `stop` was set
                    yield from self._join(call)
        except (grpc.RpcError, tls.TlsError, _DamagedError) as error:
            if not read.ended:
                reason = error.details() if isinstance(error, grpc.Call) else str(error)
                log.warning("blocks not copied", engine=self._address, reason=reason)

    def _open(self) -> grpc.Channel:
        if self._tls is None or self._address.startswith("unix:"):
            return grpc.insecure_channel(self._address, _OPTIONS)
        credentials = tls.channel_credentials(self._tls)
        options = [*_OPTIONS, *tls.channel_options(self._tls)]
        return grpc.secure_channel(self._address, credentials, options)

    def _join(
        self, pieces: Iterable[engine_pb2.ReadBlocksResponse]
    ) -> Generator[Bytes, None, None]:
        """Yield blocks from their pieces.

        Raises:
            _DamagedError: A block does not have its size or checksum.
        """
        contents, filled = np.empty(self.rate.block_bytes, np.uint8), 0
        for piece in pieces:
            end = filled + len(piece.data)
            if end <= len(contents):
                contents[filled:end] = np.frombuffer(piece.data, np.uint8)
            filled = end
            if not piece.HasField("checksum"):
                continue
            if filled != len(contents) or zlib.crc32(contents.data) != piece.checksum:
                raise _DamagedError("a block arrived damaged")
            yield contents
            contents, filled = np.empty_like(contents), 0


class _DamagedError(Exception):
    """A block arrived damaged."""
