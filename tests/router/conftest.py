"""Tiny tokenizers, and an engine with scripted tokens, over real gRPC."""

import asyncio
import json
import time
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import grpc.aio
import hypothesis
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from octavo.common import rpc, tls
from octavo.common.listening import listen
from octavo.common.tls import Tls
from octavo.router.server import Router
from octavo.router.settings import RouterSettings
from octavo.v1 import engine_pb2, engine_pb2_grpc, generation_pb2_grpc
from octavo.v1.sampling_pb2 import FinishReason

hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

EOS = 256
HEARTBEAT_SECONDS = 0.1
CHAT_TEMPLATE = (
    "{% if mood %}mood {{ mood.level }}{% endif %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('tools are not spoken to') }}{% endif %}"
    "<s>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """Ids 0-255 are the bytes in the alphabet's order, 256 is </s>, then come merged tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<s>")])
    tokenizer.add_tokens([AddedToken("é!", normalized=False), AddedToken("qqq")])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Return one like sentencepiece's: metaspace, and bytes for characters without a token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += ["▁", "▁▁", "▁the", "▁a", "a", "b", "ing", "é", "日", "\ufffd", ".", "▁日本"]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Return the byte-fallback tokenizer with a decoder that drops the first token's spaces."""
    tokenizer = byte_fallback_tokenizer()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece_tokenizer() -> Tokenizer:
    words = ["[UNK]", "a", "the", "##ing", "##s", ".", "don", "'", "t", "n't", "é", "##日"]
    tokenizer = Tokenizer(
        models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[UNK]", special=True)])
    return tokenizer


TINY = {
    "byte_level": byte_level_tokenizer,
    "byte_fallback": byte_fallback_tokenizer,
    "metaspace": metaspace_tokenizer,
    "word_piece": word_piece_tokenizer,
}


@pytest.fixture(scope="session", params=sorted(TINY))
def tiny(request) -> Tokenizer:
    return TINY[request.param]()


def save_tokenizer(directory, *, chat: bool = True) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), eos_token="</s>")
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(directory)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def plain_tokenizer_dir(tmp_path_factory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("plain"), chat=False)


@pytest.fixture(scope="session")
def encode():
    tokenizer = byte_level_tokenizer()
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


class ScriptedEngine(engine_pb2_grpc.EngineServiceServicer):
    """Follows engine.proto; its tokens are `script(submit, index)`, or sent by the test.

    With `interval` None it sends only what `send` sends, and heartbeats unless `hung`.
    """

    def __init__(self, tokenizer: str, script=None, *, interval: float | None = 0.0, **info):
        defaults = {
            "model": "tiny",
            "vocab_size": 260,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "max_outputs": 8,
            "block_size": 16,
            "eos_token_ids": [EOS],
        }
        self.info = engine_pb2.GetEngineInfoResponse(
            **{"tokenizer": tokenizer, **defaults, **info},
            load=engine_pb2.Load(total_blocks=256, free_blocks=256),
        )
        self.script = script
        self.interval = interval
        self.submits: list[engine_pb2.Submit] = []
        self.aborts: list[tuple[str, int | None]] = []
        self.playing: dict[str, set[int]] = {}
        self.outboxes: list[asyncio.Queue] = []
        self.tasks: set[asyncio.Task] = set()
        self.hung = False
        self.address = ""
        self.server = None

    async def start(self, port: int = 0, tls: Tls | None = None) -> "ScriptedEngine":
        name = "octavo.v1.EngineService"
        add = engine_pb2_grpc.add_EngineServiceServicer_to_server
        self.server, _ = await rpc.create_server(
            {name: lambda server: add(self, server)}, max_message_bytes=1 << 24
        )
        self.address = listen(self.server, "127.0.0.1", port, tls)
        await self.server.start()
        return self

    async def kill(self) -> None:
        for task in self.tasks:
            task.cancel()
        if self.server is not None:
            await self.server.stop(None)
            self.server = None

    def send(self, **fields) -> None:
        response = engine_pb2.SessionResponse(**fields)
        for outbox in self.outboxes:
            outbox.put_nowait(response)

    def send_tokens(self, request_id, token_ids, *, index=0, reason=0, **fields) -> None:
        output = engine_pb2.SequenceOutput(
            request_id=request_id,
            index=index,
            token_ids=token_ids,
            finish_reason=reason,
            **fields,
        )
        self.send(outputs=[output])

    async def GetEngineInfo(self, request, context):  # noqa: N802
        return self.info

    async def Session(self, request_iterator, context):  # noqa: N802
        outbox: asyncio.Queue = asyncio.Queue()
        self.outboxes.append(outbox)

        async def beat():
            while True:
                if not self.hung:
                    outbox.put_nowait(engine_pb2.SessionResponse(load=self.info.load))
                await asyncio.sleep(HEARTBEAT_SECONDS)

        async def read():
            async for request in request_iterator:
                if request.HasField("submit"):
                    self._submit(request.submit)
                else:
                    self._abort(request.abort)

        tasks = [asyncio.create_task(read()), asyncio.create_task(beat())]
        try:
            while True:
                await context.write(await outbox.get())
        finally:
            for task in tasks:
                task.cancel()
            self.outboxes.remove(outbox)

    def _submit(self, submit) -> None:
        self.submits.append(submit)
        if self.interval is not None:
            task = asyncio.create_task(self._play(submit))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def _abort(self, abort) -> None:
        index = abort.index if abort.HasField("index") else None
        self.aborts.append((abort.request_id, index))
        playing = self.playing.get(abort.request_id, set())
        if index is None:
            playing.clear()
        else:
            playing.discard(index)

    async def _play(self, submit) -> None:
        request_id = submit.request_id
        n = submit.sampling.n if submit.sampling.HasField("n") else 1
        scripts = [self.script(submit, i) for i in range(n)]
        playing = self.playing[request_id] = set(range(n))
        for resume in submit.resume:
            script = scripts[resume.index]
            assert list(resume.token_ids) == script[: len(resume.token_ids)]
            scripts[resume.index] = script[len(resume.token_ids) :]
            if resume.finished:
                playing.discard(resume.index)
        self.send(started=[engine_pb2.Started(request_id=request_id)])
        step = 0
        while playing:
            await asyncio.sleep(self.interval)
            for i in sorted(playing):
                last = step + 1 == len(scripts[i])
                token = scripts[i][step]
                reason = FinishReason.FINISH_REASON_LENGTH if last else 0
                if last and token == EOS:
                    reason = FinishReason.FINISH_REASON_EOS
                if step % 2 and not last and len(self.outboxes) == 1:  # each form in turn
                    self.send(tokens={"numbers": [submit.first_number + i], "token_ids": [token]})
                else:
                    self.send_tokens(request_id, [token], index=i, reason=reason)
                if last:
                    playing.discard(i)
            step += 1
        self.playing.pop(request_id, None)


class RouterFixture:
    """A router, its client's stub, and helpers for tests."""

    def __init__(self, router: Router, channel: grpc.aio.Channel):
        self.router = router
        self.channel = channel
        self.stub = generation_pb2_grpc.GenerationServiceStub(channel)

    async def until(self, condition, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come to pass"
            await asyncio.sleep(0.005)

    async def up(self, engines: int = 1) -> None:
        await self.until(lambda: len(self.router.pool.up()) == engines)

    def leftovers(self) -> dict[str, int]:
        """Return all resources that requests hold; zeros without requests."""
        engines = self.router.pool.up()
        return {
            "calls": self.router.generator.in_flight,
            "requests": len(self.router.generator._attempts.requests),
            "queued": len(self.router.admission),
            "sequences": sum(engine.sequences for engine in engines),
            "receivers": sum(engine.num_requests for engine in engines),
        }

    async def clean(self) -> None:
        await self.until(lambda: not any(self.leftovers().values()))


@asynccontextmanager
async def router_fixture(
    *engines: ScriptedEngine, addresses=(), client_options=(), client_tls=None, **settings
):
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.kill)
            if engine.server is None:
                await engine.start()
        router = Router(
            RouterSettings(
                engine=[*(engine.address for engine in engines), *addresses],
                port=0,
                metrics_port=0,
                **settings,
            )
        )
        stack.push_async_callback(router.stop)
        await router.start()
        channel = await stack.enter_async_context(
            open_channel(router.address, client_tls, client_options)
        )
        yield RouterFixture(router, channel)


def open_channel(address: str, files: Tls | None, options=()) -> grpc.aio.Channel:
    if files is None:
        return grpc.aio.insecure_channel(address, options=options)
    options = [*options, *tls.channel_options(files)]
    return grpc.aio.secure_channel(address, tls.channel_credentials(files), options=options)


@pytest.fixture(name="open_channel")
def _open_channel():
    return open_channel


@pytest.fixture
def serve():
    return router_fixture


@pytest.fixture
async def scripted(tokenizer_dir, encode):
    """Creates engines that answer `text` to all requests, one byte per token.

    They are stopped at the end, also if the test fails: while a server is left that nobody can
    stop, grpc may wait for it forever, when its last channel is collected.
    """
    engines = []

    def make(text: str = "hello world", *, eos: bool = False, **options) -> ScriptedEngine:
        tokens = encode(text) + [EOS] * eos
        options.setdefault("script", lambda submit, index: tokens)
        engines.append(ScriptedEngine(options.pop("tokenizer", tokenizer_dir), **options))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.kill()
