"""Blocks copied from another engine: right, or computed, however the copy is cut or damaged."""

import asyncio
import random
import socket
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import grpc
import pytest
from transformers import BambaConfig, LlamaConfig, MistralConfig

from octavo.common.kv_cache.prefix_hash import reusable_keys
from octavo.common.listening import listen
from octavo.common.rpc import create_server
from octavo.engine.kv_disk import reads
from octavo.engine.kv_disk.read_ahead import ReadAhead
from octavo.engine.rpc import block_sender
from octavo.engine.rpc.block_sender import BlockSender
from octavo.engine.rpc.service import EngineService
from octavo.engine.rpc.service_registry import SERVICE
from octavo.v1 import engine_pb2, engine_pb2_grpc
from tests.engine.kv_disk.test_restart import outcome
from tests.engine.random_model import TINY, save_random_model
from tests.engine.test_core import PATIENCE, Running
from tests.integration.harness import wait_until

PROMPT, OUTPUT, CACHED = 100, 12, 96
CONFIGS = {
    "full attention": LlamaConfig(**TINY),
    "sliding windows": MistralConfig(**TINY | {"sliding_window": 24}),
    "states": BambaConfig(
        **TINY | {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1},
        attn_layer_indices=[1],
    ),
}
TOKEN_SECONDS = 0.02
HERE = ("ip:127.0.0.1", "dns:localhost")


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_random_model(CONFIGS[request.param], path, std=0.12)
    return path


full_attention = pytest.mark.parametrize("model", ["full attention"], indirect=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Let a busy machine delay reads, and compute as slowly as a large model."""
    monkeypatch.setattr(reads, "MIN_DELAY_SECONDS", 5.0)
    monkeypatch.setattr(ReadAhead, "_prefill_seconds", lambda _, tokens: tokens * TOKEN_SECONDS)


class Serving(Running):
    """An engine whose blocks others can read.

    Attributes:
        address: Where they are read.
    """

    def __init__(self, model, **settings):
        super().__init__(model, swap_space=0.1, **settings)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._run(self._serve())

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    async def _serve(self):
        service, parts = EngineService(), self.parts
        self.sender = BlockSender(self.core, parts.block_layout, parts.block_bytes)
        adapters = SimpleNamespace(find=lambda _: None)
        service.loaded = SimpleNamespace(
            blocks=self.sender, core=self.core, parts=parts, adapters=adapters
        )
        add = engine_pb2_grpc.add_EngineServiceServicer_to_server
        services = {SERVICE: lambda server: add(service, server)}
        self.server, _ = await create_server(services, max_message_bytes=1 << 20)
        self.address = listen(self.server, "127.0.0.1", 0, self.settings.tls)
        await self.server.start()

    def stop(self):
        self._run(self.server.stop(None))
        self.core.stop()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def generate(self, name="a", **options):
        """Return the output of a prompt, and how many of its tokens were cached."""
        self.submit(name, PROMPT, OUTPUT, **options)
        return outcome(self, name)

    def forget(self):
        """Empty the prefix cache."""
        self.core.call(self.parts.scheduler.cache.forget_contents)
        self.heard.events.clear()
        self.wait_idle()

    def stub(self):
        channel = grpc.insecure_channel(self.address)
        return engine_pb2_grpc.EngineServiceStub(channel)


@contextmanager
def two(model, **settings):
    """An engine that has computed a prompt, its output, and another engine."""
    one, other = Serving(model, **settings), Serving(model, **settings)
    try:
        tokens, cached = one.generate()
        assert cached == 0
        yield one, tokens, other
        wait_until(lambda: one.sender.reading == 0)
    finally:
        one.stop()
        other.stop()


class Wire:
    """A proxy to a server that harms what the server sends, on every connection.

    Attributes:
        cut: The number of bytes after which it closes the connection.
        stall: The number of bytes after which it forwards no more.
        flip: The index of a byte that it changes.
        seconds: Delay before each piece.
        carried: Bytes of the last connection.
        connections: The number of connections.
    """

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut = self.stall = self.flip = 1 << 60
        self.seconds = 0.0
        self.carried = self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                server = socket.create_connection(self._target)
                for work in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=work, daemon=True).start()

    def _pump(self, source, target, harmful):
        done = 0
        with suppress(OSError):
            while data := bytearray(source.recv(4096)):
                if harmful:
                    data = data[: max(self.cut - done, 0)]
                    if done <= self.flip < done + len(data):
                        data[self.flip - done] ^= 1
                    if done + len(data) > self.stall:
                        return
                    time.sleep(self.seconds)
                target.sendall(data)
                done += len(data)
                if harmful:
                    self.carried = done
                if done >= self.cut:
                    target.shutdown(socket.SHUT_WR)
                    return
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()


def test_an_engine_copies_what_another_has_computed(model):
    with two(model) as (one, tokens, other):
        assert other.generate(kv_source=one.address) == (tokens, CACHED)
        assert other.generate("b", kv_source=one.address) == (tokens, CACHED)  # from memory now
        sample = other.metrics.registry.get_sample_value
        read = sample("octavo_engine_peer_blocks_total", {"what": "read"})
        assert read > 0
        sent = one.metrics.registry.get_sample_value
        one.wait_idle()
        assert sent("octavo_engine_peer_blocks_total", {"what": "sent"}) == read


@full_attention
def test_offloaded_blocks_are_copied(model):
    with two(model, num_blocks=16) as (one, tokens, other):
        one.generate("again")  # a prefix that was hit is offloaded when it is evicted
        one.submit("long", 220, 2, seed=1, logit_bias={5: 100.0}, cache_salt="x")
        outcome(one, "long")
        cache = one.parts.scheduler.cache
        keys = list(reusable_keys(range(3, 3 + PROMPT), 16))
        assert any(cache.device.find(key) is None for key in keys)
        assert other.generate(kv_source=one.address) == (tokens, CACHED)


@full_attention
def test_a_copy_that_is_cut_or_damaged_at_any_byte_changes_no_output(model):
    with two(model) as (one, tokens, other):
        wire = Wire(one.address)
        assert other.generate(kv_source=wire.address) == (tokens, CACHED)
        whole = wire.carried
        places = random.Random(0).sample(range(whole), 30)
        for harm in ("cut", "flip"):
            found = set()
            for place in places:
                other.forget()
                setattr(wire, harm, place)
                got, cached = other.generate(kv_source=wire.address)
                assert got == tokens, (harm, place)
                found.add(cached)
            assert len(found) > 1, (harm, found)
            setattr(wire, harm, 1 << 60)
        wire.close()
        other.forget()
        assert other.generate(kv_source=wire.address) == (tokens, 0)  # it cannot be reached


@full_attention
def test_nobody_waits_for_a_source_that_hangs(model, monkeypatch):
    monkeypatch.setattr(reads, "MIN_DELAY_SECONDS", 0.3)
    with two(model) as (one, tokens, other):
        wires = [Wire(one.address) for _ in range(2)]
        other.generate(kv_source=wires[1].address)
        for wire, stall, least in ((wires[0], 0, 0), (wires[1], wires[1].carried // 2, 16)):
            other.forget()
            wire.stall = stall
            began = time.monotonic()
            got, cached = other.generate(kv_source=wire.address)
            assert got == tokens
            assert least <= cached < CACHED
            assert time.monotonic() - began < 5
            wait_until(lambda: not other.peers.reads._hanging, what="its thread to be free")
            wire.close()
        assert other.peers.reads.counters["late"] == 2


@full_attention
def test_computing_is_chosen_where_copying_is_slower(model, monkeypatch):
    monkeypatch.setattr(reads, "MIN_DELAY_SECONDS", 0.3)
    with two(model) as (one, tokens, other):
        wire = Wire(one.address)
        wire.seconds = TOKEN_SECONDS * 16
        assert other.generate(kv_source=wire.address)[0] == tokens
        other.forget()
        assert other.generate(kv_source=wire.address) == (tokens, 0)
        assert wire.connections == 1, "it tried again though copying was measured to be slower"
        assert other.generate("b", kv_source=one.address)[0] == tokens
        wire.close()


@full_attention
def test_a_layout_mismatch_is_refused_by_name(model):
    with two(model) as (one, tokens, _):
        other = Serving(model, block_size=32)
        try:
            assert other.generate(kv_source=one.address) == (tokens, 0)
            layout = other.parts.block_layout
            request = engine_pb2.ReadBlocksRequest(block_layout=layout, keys=[bytes(32)])
            with pytest.raises(grpc.RpcError) as caught:
                list(one.stub().ReadBlocks(request))
        finally:
            other.stop()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert layout in caught.value.details()
        assert one.parts.block_layout in caught.value.details()


@full_attention
@pytest.mark.parametrize("keys", [[], [bytes(65)], (1 << 16) * [b"k"] + [b"k"]])
def test_invalid_keys_are_refused(model, keys):
    engine = Serving(model)
    try:
        layout = engine.parts.block_layout
        request = engine_pb2.ReadBlocksRequest(block_layout=layout, keys=keys)
        with pytest.raises(grpc.RpcError) as caught:
            list(engine.stub().ReadBlocks(request))
    finally:
        engine.stop()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@full_attention
def test_engines_that_share_no_blocks_say_so(model):
    engine = Serving(model, enable_prefix_caching=False)
    try:
        request = engine_pb2.ReadBlocksRequest(block_layout="x", keys=[b"k"])
        with pytest.raises(grpc.RpcError) as caught:
            list(engine.stub().ReadBlocks(request))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        tokens, cached = engine.generate(kv_source="127.0.0.1:1")
        assert (len(tokens), cached) == (OUTPUT, 0)
    finally:
        engine.stop()


@full_attention
def test_only_so_many_copies_are_made_at_once(model, monkeypatch):
    monkeypatch.setattr(block_sender, "MAX_READERS", 2)
    with two(model) as (one, _, _other):
        one.core.call(time.sleep, 1.0)  # a long step
        layout, keys = one.parts.block_layout, list(reusable_keys(range(3, 3 + PROMPT), 16))
        request = engine_pb2.ReadBlocksRequest(block_layout=layout, keys=keys)
        calls = [one.stub().ReadBlocks(request) for _ in range(2)]
        wait_until(lambda: one.sender.reading == 2)
        with pytest.raises(grpc.RpcError) as caught:
            list(one.stub().ReadBlocks(request))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        calls[0].cancel()
        assert len(list(calls[1])) == len(keys)


@full_attention
def test_a_request_that_is_aborted_while_it_is_copied_ends(model):
    with two(model) as (one, _, other):
        wire = Wire(one.address)
        wire.stall = 0
        other.submit("a", PROMPT, OUTPUT, kv_source=wire.address)
        wait_until(lambda: other.core.read_ahead.reads)
        other.core.abort(0, "a")
        other.wait_idle()
        assert other.outcome("aborted") == 1
        wire.close()


@full_attention
def test_copies_need_a_certificate_where_engines_do(model, authority, impostor):
    files = {
        name: dict(zip(("tls_cert", "tls_key"), issuer.issue(name, *HERE), strict=True))
        for name, issuer in (("one", authority), ("other", authority), ("stranger", impostor))
    }
    ca = {"tls_client_ca": authority.ca}
    one = Serving(model, **files["one"], **ca)
    engines = [one]
    try:
        tokens, _ = one.generate()
        for name, cached in (("other", CACHED), ("stranger", 0)):
            engines.append(Serving(model, **files[name], **ca))
            assert engines[-1].generate(kv_source=one.address) == (tokens, cached), name
    finally:
        for engine in engines:
            engine.stop()


def prefetch(engine, source, **fields):
    """Have an engine follow another one that computes the prompt; return the call."""
    prompt = range(3, 3 + PROMPT)
    fields = {"prompt_token_ids": prompt, "kv_source": source} | fields
    return engine.stub().PrefetchBlocks.future(engine_pb2.PrefetchBlocksRequest(**fields))


def test_blocks_are_copied_while_they_are_computed(model):
    one, other = engines = [Serving(model, max_num_batched_tokens=32) for _ in range(2)]
    try:
        call = prefetch(other, one.address)
        wait_until(lambda: one.sender.reading)
        tokens, _ = one.generate()
        if model_has_states(one):  # those of a prompt's end are kept, if it ends with a block
            call.cancel()
        else:
            call.result(PATIENCE)
            assert not other.core.read_ahead._waiting
        assert other.generate(kv_source=one.address) == (tokens, CACHED)
        wait_until(lambda: one.sender.reading == 0)
    finally:
        for engine in engines:
            engine.stop()


def model_has_states(engine):
    return engine.parts.scheduler.cache.prefixes.keeps_states


@full_attention
def test_a_request_waits_for_its_prefetch(model):
    one, other = engines = [Serving(model) for _ in range(2)]
    try:
        call = prefetch(other, one.address)
        wait_until(lambda: one.sender.reading)
        other.submit("a", PROMPT, OUTPUT, kv_source=one.address)
        wait_until(lambda: other.core.read_ahead.reads)
        call.cancel()  # the request still wants the blocks
        tokens, _ = one.generate()
        assert outcome(other, "a") == (tokens, CACHED)
        assert other.peers.reads.counters["read"] == CACHED / 16
        wait_until(lambda: one.sender.reading == 0)
    finally:
        for engine in engines:
            engine.stop()


@full_attention
def test_a_prefetch_that_brings_nothing_costs_a_request_no_more_than_a_late_read(
    model, monkeypatch
):
    monkeypatch.setattr(reads, "MIN_DELAY_SECONDS", 0.3)
    one, other = engines = [Serving(model) for _ in range(2)]
    try:
        call = prefetch(other, one.address)
        wait_until(lambda: one.sender.reading)
        got, cached = other.generate(kv_source=one.address)
        assert (len(got), cached) == (OUTPUT, 0)
        call.result(PATIENCE)
        assert got == one.generate()[0]
        wait_until(lambda: one.sender.reading == 0)
    finally:
        for engine in engines:
            engine.stop()


@full_attention
def test_a_prefetch_tells_how_long_computing_takes(model, monkeypatch):
    monkeypatch.setattr(reads, "MIN_DELAY_SECONDS", 0.3)
    one, other = engines = [Serving(model) for _ in range(2)]
    read_ahead = other.core.read_ahead
    try:
        prompt = range(3, 3 + 2 * PROMPT)
        call = prefetch(other, one.address, prompt_token_ids=prompt)
        wait_until(lambda: one.sender.reading)
        time.sleep(1.0)
        one.generate()  # the blocks of the first half of the prompt
        wait_until(lambda: next(iter(read_ahead._prefetches))._num_read == CACHED / 16)
        other.submit("a", 2 * PROMPT, 1, kv_source=one.address)
        outcome(other, "a")
        assert 1.0 < CACHED * read_ahead._assumed_token_seconds < PATIENCE
        call.result(PATIENCE)
    finally:
        for engine in engines:
            engine.stop()


@full_attention
def test_a_cancelled_prefetch_leaves_nothing(model):
    with two(model) as (_, tokens, other):
        empty = Serving(model)
        try:
            call = prefetch(other, empty.address)
            wait_until(lambda: empty.sender.reading)
            call.cancel()
            wait_until(lambda: not empty.sender.reading)
            wait_until(lambda: not other.core.read_ahead._waiting)
            assert not other.core.read_ahead._prefetches
            other.submit("a", PROMPT, OUTPUT, kv_source=empty.address)
            other.core.abort(0, "a")
            assert other.generate("b")[0] == tokens
        finally:
            empty.stop()


@full_attention
def test_waiting_for_a_block_ends(model, monkeypatch):
    monkeypatch.setattr(block_sender, "WAIT_SECONDS", 0.1)
    one, other = engines = [Serving(model) for _ in range(2)]
    try:
        prefetch(other, one.address).result(PATIENCE)
    finally:
        for engine in engines:
            engine.stop()


@full_attention
@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"prompt_token_ids": []}, grpc.StatusCode.INVALID_ARGUMENT, "1 to"),
        ({"prompt_token_ids": [500]}, grpc.StatusCode.INVALID_ARGUMENT, "prompt_token_ids"),
        ({"kv_source": ""}, grpc.StatusCode.INVALID_ARGUMENT, "kv_source"),
        ({"kv_source": "x" * 257}, grpc.StatusCode.INVALID_ARGUMENT, "kv_source"),
        ({"adapter": "none"}, grpc.StatusCode.NOT_FOUND, "'none'"),
    ],
)
def test_invalid_prefetches_are_refused(model, fields, code, said):
    engine = Serving(model)
    try:
        with pytest.raises(grpc.RpcError) as caught:
            prefetch(engine, "127.0.0.1:1", **fields).result(PATIENCE)
    finally:
        engine.stop()
    assert caught.value.code() is code
    assert said in caught.value.details()
