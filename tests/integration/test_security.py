"""Keys and certificates over real processes: service, prefix sharing, and logs."""

import asyncio
import time
from contextlib import AsyncExitStack

import grpc
import pytest

import octavo
from benchmarks import fixture

HERE = ("ip:127.0.0.1", "dns:localhost")
WORD = "zanzibarquokka"
"""Text in every prompt that must appear nowhere else."""


def tenants(**tables):
    from octavo.router.tenants.tenant import hash_key

    return "".join(
        f'[{name}]\nkeys = ["{hash_key(f"{name}-key")}"]\n{more}\n' for name, more in tables.items()
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return fixture.make_model(tmp_path_factory.mktemp("model"))


async def test_tenants_over_mutual_tls_share_prefixes_only_where_told(model, authority, tmp_path):
    file = tmp_path / "tenants.toml"
    team = 'share_prefixes = "team"'
    file.write_text(tenants(alice="", bob="", carol=team, dave=team))
    cert, key = authority.issue("engine", *HERE)
    guarded = {"tls_client_ca": authority.ca}
    engine = fixture.engine(model, tls_cert=cert, tls_key=key, **guarded)
    own_cert, own_key = authority.issue("router", *HERE)
    router = fixture.router(
        [engine.address],
        tenants=file,
        tls_cert=own_cert,
        tls_key=own_key,
        engine_ca=authority.ca,
        engine_cert=own_cert,
        engine_key=own_key,
        **guarded,
    )
    files = octavo.Tls(authority.ca, *authority.issue("client"))
    async with AsyncExitStack() as stack:
        for node in (engine, router):
            stack.push_async_callback(node.close)
            await node.start()

        def client(name):
            made = octavo.AsyncClient(router.address, api_key=f"{name}-key", tls=files)
            return stack.enter_async_context(made)

        clients = {name: await client(name) for name in ("alice", "bob", "carol", "dave")}
        while not await clients["alice"].is_serving():
            await asyncio.sleep(0.02)

        async def cached(name, salt=None):
            prompt = "Everybody begins with the same long words. " * 4
            options = {"max_tokens": 1, "cache_salt": salt}
            return (await clients[name].generate(prompt, **options).complete()).usage.cached_tokens

        found = [await cached(name) > 0 for name in ("alice", "alice", "bob", "bob", "carol")]
        assert found == [False, True, False, True, False]
        assert await cached("dave") > 0
        assert await cached("alice", "x") == 0
        assert await cached("bob", "x") == 0
        stranger = await client("eve")
        with pytest.raises(octavo.UnauthenticatedError):
            await stranger.generate("x").complete()
        async with octavo.AsyncClient(engine.address, tls=octavo.Tls(authority.ca)) as direct:
            assert not await direct.is_serving()  # without a certificate


@pytest.mark.parametrize("form", ["json", "console"])
async def test_neither_keys_nor_prompts_are_written_down(model, tmp_path, form):
    file = tmp_path / "tenants.toml"
    file.write_text(tenants(alice="", bob="models = []"))
    said = {"log_format": form, "log_level": "debug"}
    engine = fixture.engine(model, **said)
    router = fixture.router([engine.address], tenants=file, **said)
    async with AsyncExitStack() as stack:
        for name, node in (("engine", engine), ("router", router)):
            node.errors = tmp_path / name
            stack.push_async_callback(node.close)
            await node.start()
        await asyncio.to_thread(use, router.address)
        file.touch()
        while "tenants' file reloaded" not in router.errors.read_text():
            await asyncio.sleep(0.05)
    text = engine.errors.read_text() + router.errors.read_text()
    assert "alice" in text
    assert "request done" in text
    assert "session closed" in text
    for secret in (WORD, "alice-key", "bob-key", "eve-key"):
        assert secret not in text


def use(address):
    """Send requests with every outcome for prompts and keys."""
    with octavo.Client(address) as client:
        while not client.is_serving():
            time.sleep(0.02)
    calls = [
        ("alice", {"max_tokens": 4}, None),
        ("alice", {"max_tokens": 4, "stop": [WORD], "logprobs": 1, "n": 2}, None),
        ("alice", {"max_tokens": 4, "model": WORD[:4]}, grpc.StatusCode.NOT_FOUND),
        ("alice", {"max_tokens": 4, "stop": [WORD] * 100}, grpc.StatusCode.INVALID_ARGUMENT),
        ("alice", {"max_tokens": 4, "temperature": -1}, grpc.StatusCode.INVALID_ARGUMENT),
        ("alice", {"max_tokens": 4, "priority": 9}, grpc.StatusCode.PERMISSION_DENIED),
        ("bob", {"max_tokens": 4}, grpc.StatusCode.PERMISSION_DENIED),
        ("eve", {"max_tokens": 4}, grpc.StatusCode.UNAUTHENTICATED),
    ]
    prompts = [f"a {WORD}", f"{WORD} " * 40, [octavo.Message("user", WORD)]]
    for name, options, expected in calls:
        with octavo.Client(address, api_key=f"{name}-key") as client:
            for prompt in prompts:
                code = None
                try:
                    client.generate(prompt, timeout=120, **options).complete()
                except octavo.Error as error:
                    code = error.code
                if prompt is prompts[0]:
                    assert code is expected, (name, options)
    with octavo.Client(address, api_key="alice-key") as client:
        with client.generate(f"a {WORD}", max_tokens=200, ignore_eos=True) as stream:
            next(iter(stream))
        assert client.tokenize(f"a {WORD}")
