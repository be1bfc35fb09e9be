"""A subscriber's index of the prefix cache, from a snapshot and what follows."""

import asyncio

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2

from octavo.common.kv_cache.prefix_hash import reusable_keys
from octavo.engine.events import PrefixChange
from octavo.engine.rpc.vllm.kv_events import CHUNK_BLOCKS, KvSubscription
from tests.engine.rpc.vllm.conftest import serving
from tests.engine.rpc.vllm.test_service import generate, idle
from tests.integration.harness import wait_until


def signed(key: bytes) -> int:
    return int.from_bytes(key[:8], "little", signed=True)


class Index:
    """What a gateway makes of batches: each block's parent and tokens, by hash."""

    def __init__(self):
        self.blocks = {}
        self.sequence = 0

    def add(self, batch):
        assert batch.sequence_number == self.sequence + 1
        self.sequence = batch.sequence_number
        for event in batch.events:
            match event.WhichOneof("data"):
                case "cleared":
                    self.blocks.clear()
                case "removed":
                    for block in event.removed.block_hashes:
                        del self.blocks[block]
                case "stored":
                    parent = None
                    if event.stored.HasField("parent_block_hash"):
                        parent = event.stored.parent_block_hash
                    for block in event.stored.blocks:
                        assert block.block_hash not in self.blocks
                        self.blocks[block.block_hash] = (parent, tuple(block.token_ids))
                        parent = block.block_hash

    async def follow(self, call, condition):
        async with asyncio.timeout(20):
            while not condition():
                self.add(await call.read())


def subscribe(engine):
    return engine.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())


def held(engine):
    """The hashes of what the cache holds now."""
    return {signed(key) for key in engine.cache.device._block_of}


async def test_an_index_is_exact_from_a_snapshot_on(byte_model):
    async with serving(byte_model, num_blocks=80) as engine:
        engine.start()
        prompts = [[i] * 20 + list(range(60)) for i in range(12)]
        early = subscribe(engine)
        index = Index()
        index.add(await early.read())
        assert index.blocks == {}
        for prompt in prompts:  # more than the cache holds
            await generate(engine, prompt)
        await idle(engine)
        await index.follow(early, lambda: index.blocks.keys() == held(engine))
        late, again = subscribe(engine), Index()
        again.add(first := await late.read())
        assert (first.snapshot.index, first.snapshot.count) == (0, 1)
        assert first.snapshot.blocks == len(held(engine)) > 50
        assert again.blocks == index.blocks
        keys = [signed(key) for key in reusable_keys(prompts[-1], 16)]
        for i, key in enumerate(keys):
            parent = keys[i - 1] if i else None
            assert index.blocks[key] == (parent, tuple(prompts[-1][i * 16 : i * 16 + 16]))
        engine.core.call(engine.cache.forget_contents)
        await generate(engine, [1] * 20)
        await idle(engine)
        for one, call in ((index, early), (again, late)):
            await one.follow(call, lambda one=one: one.blocks.keys() == held(engine))
            assert len(one.blocks) == 1
            call.cancel()


async def test_blocks_read_from_disk_are_announced(byte_model, tmp_path):
    disk = {"kv_disk": tmp_path, "swap_space": 0.1}
    prompt = list(range(200))
    async with serving(byte_model, **disk) as engine:
        engine.start()
        await generate(engine, prompt)
        await asyncio.to_thread(wait_until, lambda: len(list(tmp_path.rglob("*.kv"))) >= 12)
    async with serving(byte_model, **disk) as engine:
        engine.start()
        index, call = Index(), subscribe(engine)
        index.add(await call.read())
        await generate(engine, prompt)
        await idle(engine)
        keys = list(reusable_keys(prompt, 16))
        assert set(keys) <= engine.cache.prefixes.published
        await index.follow(call, lambda: index.blocks.keys() == held(engine))
        parents = [None, *map(signed, keys)]
        for i, key in enumerate(keys):
            tokens = tuple(prompt[i * 16 : i * 16 + 16])
            assert index.blocks[signed(key)] == (parents[i], tokens)
        call.cancel()


async def test_a_subscriber_that_never_reads_costs_the_engine_nothing(engine):
    calls = [subscribe(engine) for _ in range(3)]
    for i in range(40):
        await generate(engine, [i] * 64, max_tokens=1)
    index = Index()
    await index.follow(calls[0], lambda: index.blocks.keys() == held(engine))
    for call in calls:
        call.cancel()


async def test_only_a_snapshot_can_be_asked_for(byte_model, engine):
    request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=3)
    with pytest.raises(grpc.aio.AioRpcError, match="must be 0") as caught:
        await engine.stub.SubscribeKvEvents(request).read()
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    async with serving(byte_model, enable_prefix_caching=False) as without:
        without.start()
        with pytest.raises(grpc.aio.AioRpcError, match="no-enable-prefix-caching") as caught:
            await subscribe(without).read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_changes_while_a_batch_is_being_sent():
    """What is evicted between two batches of one turn was told, and is taken back."""
    contents = {bytes([i // 256, i % 256] * 16): (b"", (i,)) for i in range(1200)}
    subscription, index = KvSubscription(), Index()
    subscription.add_prefixes(PrefixChange(0, (), ()))
    batches = subscription.batches()
    index.add(await anext(batches))
    subscription.add_prefixes(PrefixChange(None, contents, (), contents))
    index.add(await anext(batches))
    assert len(index.blocks) == CHUNK_BLOCKS
    first, *others = contents
    subscription.add_prefixes(PrefixChange(None, (), others))
    while len(index.blocks) != 1:
        index.add(await anext(batches))
    assert index.blocks.keys() == {signed(first)}
    subscription.add_prefixes(PrefixChange(None, (), (first, b"never told" * 4)))
    batch = await anext(batches)
    assert [event.WhichOneof("data") for event in batch.events] == ["cleared"]
    subscription.close()
    assert [batch async for batch in batches] == []
