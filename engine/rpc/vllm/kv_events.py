"""Streams of the prefix cache's contents and changes, for gateways that index them.

Only blocks without a salt are sent, as calls of this contract have none. So a gateway does not see
the prompts of Octavo's tenants.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from itertools import count

import grpc
from smg_grpc_proto.generated import common_pb2

from octavo.common import rpc
from octavo.common.kv_cache.prefix_hash import ROOT_KEY
from octavo.engine.events import PrefixChange, StepOutput
from octavo.engine.kv_cache import BlockContents
from octavo.v1 import engine_pb2

CHUNK_BLOCKS = 512
"""Maximum blocks per message."""


class KvSubscription:
    """One subscriber's batches: a snapshot, then the changes of each step.

    If the subscriber reads slowly, changes are merged: a block that was stored and evicted since
    the last batch is left out. So a subscription never holds more than the cache.
    """

    def __init__(self) -> None:
        self._known: set[bytes] = set()  # keys sent to the subscriber
        self._stored: dict[bytes, BlockContents] = {}
        self._evicted: set[bytes] = set()
        self._opened = False
        self._closing = False
        self._failed = False
        self._ready = asyncio.Event()
        self._sequence = count(1)
        self._events = count(1)

    async def batches(self) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Yield batches until `close`.

        Raises:
            RpcError: DATA_LOSS after `fail`: subscribe again.
        """
        snapshot = True
        while True:
            await self._ready.wait()
            self._ready.clear()
            if self._failed:
                lost = "events were lost; subscribe again"
                raise rpc.RpcError(grpc.StatusCode.DATA_LOSS, lost)
            if self._closing:
                return
            for batch in self._snapshot() if snapshot else self._changes():
                yield batch
            snapshot = False

    def _snapshot(self) -> Iterator[common_pb2.KvEventBatch]:
        """Yield the cache's contents, in chunks."""
        stored, self._stored = self._stored, {}
        self._known |= stored.keys()
        chunks = _chunks(stored) or [[]]
        for index, chunk in enumerate(chunks):
            batch = self._batch()
            batch.snapshot.index, batch.snapshot.count = index, len(chunks)
            batch.snapshot.blocks = len(stored)
            if index == 0:
                batch.events.add().cleared.SetInParent()
            batch.events.extend(common_pb2.KvCacheEvent(stored=run) for run in _runs(chunk))
            yield batch

    def _changes(self) -> Iterator[common_pb2.KvEventBatch]:
        """Yield the blocks evicted and stored since the last batch."""
        stored, self._stored = self._stored, {}
        evicted, self._evicted = self._evicted, set()
        left = self._known - evicted
        self._known = left | stored.keys()  # before sending: more may be evicted meanwhile
        if evicted:
            batch = self._batch()
            event = batch.events.add(event_id=next(self._events))
            if left:
                event.removed.block_hashes.extend(map(_hash, evicted))
            else:
                event.cleared.SetInParent()
            yield batch
        for chunk in _chunks(stored):
            batch = self._batch()
            for run in _runs(chunk):
                batch.events.add(event_id=next(self._events), stored=run)
            yield batch

    def _batch(self) -> common_pb2.KvEventBatch:
        return common_pb2.KvEventBatch(
            sequence_number=next(self._sequence), timestamp=time.time(), dp_rank=0
        )

    def add(self, output: StepOutput, load: engine_pb2.Load) -> None:
        """Do nothing: a subscription has no requests."""

    def add_prefixes(self, change: PrefixChange) -> None:
        """Add a change to the next batch; ignore changes before the snapshot."""
        if change.session is not None:
            self._opened = True
            self._ready.set()
        if not self._opened:
            return
        for key, contents in change.contents.items():
            if key in self._evicted:
                self._evicted.remove(key)
            else:
                self._stored[key] = contents
        for key in change.evicted:
            if self._stored.pop(key, None) is None and key in self._known:
                self._evicted.add(key)
        if self._stored or self._evicted:
            self._ready.set()

    def set_adapters(self, adapters: engine_pb2.Adapters) -> None:
        """Do nothing: the contract has no adapters."""

    def close(self) -> None:
        """End the stream: the engine stops."""
        self._closing = True
        self._ready.set()

    def fail(self) -> None:
        """End the stream with an error."""
        self._failed = True
        self._ready.set()


def _chunks(blocks: Mapping[bytes, BlockContents]) -> list[list[tuple[bytes, BlockContents]]]:
    """Return blocks in chunks, each parent before its children, chains together."""
    children: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for key, (parent, _) in blocks.items():
        children[parent].append(key)
    stack = [key for key, (parent, _) in blocks.items() if parent not in blocks]
    ordered = []
    while stack:
        key = stack.pop()
        ordered.append((key, blocks[key]))
        stack += children[key]
    return [ordered[i : i + CHUNK_BLOCKS] for i in range(0, len(ordered), CHUNK_BLOCKS)]


def _runs(
    blocks: Iterable[tuple[bytes, BlockContents]],
) -> Iterator[common_pb2.KvBlocksStored]:
    """Yield an event for each chain of consecutive blocks."""
    run, last = common_pb2.KvBlocksStored(), None
    for key, (parent, token_ids) in blocks:
        if parent != last:
            if run.blocks:
                yield run
            run = common_pb2.KvBlocksStored(
                group_idx=0,
                kv_cache_spec_kind="full_attention",
                tier=common_pb2.KV_CACHE_TIER_DEVICE,
            )
            if parent != ROOT_KEY:
                run.parent_block_hash = _hash(parent)
        run.blocks.add(block_hash=_hash(key), token_ids=token_ids, block_size=len(token_ids))
        last = key
    if run.blocks:
        yield run


def _hash(key: bytes) -> int:
    """Return a key's first 8 bytes as a signed integer, the contract's hash type."""
    return int.from_bytes(key[:8], "little", signed=True)
