"""Routes besides generation."""

import hashlib
import json
import re
from importlib.metadata import version

import openai
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from octavo.common import rpc
from octavo.common.ports import free_port
from octavo.common.settings import SettingsError
from octavo.router.http.page import PLAYGROUND
from octavo.router.server import Router
from octavo.router.settings import RouterSettings
from octavo.router.tenants.tenant import ANONYMOUS
from octavo.v1 import generation_pb2


async def test_models(frontend, scripted):
    async with frontend(scripted("a")) as (_, client):
        (model,) = [model async for model in client.models.list()]
        assert (model.id, model.object, model.owned_by) == ("tiny", "model", "octavo")
        assert model.max_model_len == 512
        assert await client.models.retrieve("tiny") == model


async def test_status_is_what_engines_report(frontend, scripted, get, hello):
    engine = scripted("abc", device="abacus", dtype="float32")
    async with frontend(engine) as (app, client):
        await client.chat.completions.create(**hello)
        engine.info.load.shared_blocks = 3
        await app.until(lambda: app.router.pool.up()[0].load.shared_blocks == 3)
        response = await get(f"{app.url}/status")
        status = json.loads(response.body)
        assert (status["requests"], status["output_tokens"]) == (0, 3)
        (shown,) = status["engines"]
        assert (shown["model"], shown["device"], shown["dtype"]) == ("tiny", "abacus", "float32")
        assert shown["load"]["total_blocks"] == 256
        assert shown["load"]["shared_blocks"] == 3
        assert engine.address not in response.body.decode()


async def test_health(frontend, scripted, get):
    engine = scripted("a")
    async with frontend(engine) as (app, _):
        assert (await get(f"{app.url}/health")).status == 200
        await engine.kill()
        await app.up(0)
        assert (await get(f"{app.url}/health")).status == 503


async def test_ping_and_version(frontend, scripted, get):
    engine = scripted("a")
    async with frontend(engine) as (app, _):
        assert (await get(f"{app.url}/ping")).status == 200
        assert (await get(f"{app.url}/ping", data=b"")).status == 200  # a POST
        answer = json.loads((await get(f"{app.url}/version")).body)
        assert answer == {"version": version("octavo")}
        await engine.kill()
        await app.up(0)
        assert (await get(f"{app.url}/ping")).status == 503


async def test_detokenize_is_the_reverse_of_tokenize(frontend, scripted, post, encode):
    async with frontend(scripted("a")) as (app, _):
        for extra, text in [
            ({}, "a<s>é"),
            ({"keep_special_tokens": False}, "aé"),
            ({"skip_special_tokens": True}, "aé"),
            ({"skip_special_tokens": False}, "a<s>é"),
            ({"skip_special_tokens": True, "keep_special_tokens": True}, "a<s>é"),
        ]:
            body = json.dumps({"tokens": [*encode("a"), 257, *encode("é")], **extra}).encode()
            response = await post(f"{app.url}/detokenize", body)
            assert json.loads(response.body) == {"prompt": text}
        response = await post(f"{app.url}/detokenize", b'{"tokens": [260]}')
        assert response.status == 400
        assert "[0, 259]" in json.loads(response.body)["error"]["message"]


async def test_metrics_are_the_router_s(frontend, scripted, get, hello):
    async with frontend(scripted("abc")) as (app, client):
        await client.chat.completions.create(**hello)
        response = await get(f"{app.url}/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=")
        assert b'octavo_router_output_tokens_total{model="tiny"} 3.0' in response.body


async def test_cross_origin_requests_need_the_setting(frontend, scripted, get):
    origin = {"Origin": "https://example.com"}
    async with frontend(scripted("a")) as (app, _):
        response = await get(f"{app.url}/v1/models", headers=origin)
        assert "access-control-allow-origin" not in response.headers
    async with frontend(scripted("a"), http_cors_origin=["https://example.com"]) as (
        app,
        _,
    ):
        response = await get(f"{app.url}/v1/models", headers=origin)
        assert response.headers["access-control-allow-origin"] == "https://example.com"
        response = await get(f"{app.url}/v1/models", headers={"Origin": "https://evil.com"})
        assert "access-control-allow-origin" not in response.headers


async def test_a_port_that_is_taken(scripted):
    port = free_port()
    settings = {"engine": ["127.0.0.1:1"], "port": 0, "metrics_port": 0, "http_port": port}
    first, second = Router(RouterSettings(**settings)), Router(RouterSettings(**settings))
    await first.start()
    try:
        with pytest.raises(OSError, match="--http-port"):
            await second.start()
    finally:
        await second.stop()
        await first.stop()


async def test_headers_become_metadata(frontend, scripted, hello, monkeypatch):
    seen = []

    async def note(message, write, *, tenant, timeout, metadata):
        seen.append((tenant, dict(metadata)))
        raise rpc.unavailable("noted")

    sent = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "k=v", "cookie": "c=d"}
    async with frontend(scripted("a")) as (app, client):
        monkeypatch.setattr(app.router.generator, "generate", note)
        with pytest.raises(openai.InternalServerError, match="noted"):
            await client.chat.completions.create(**hello, extra_headers=sent)
    ((tenant, metadata),) = seen
    assert tenant is ANONYMOUS
    assert (metadata["traceparent"], metadata["tracestate"]) == (sent["traceparent"], "k=v")
    assert "cookie" not in metadata


async def test_tokenize(frontend, scripted, post, encode):
    async with frontend(scripted("a")) as (app, _):

        async def ask(**body):
            response = await post(f"{app.url}/tokenize", json.dumps(body).encode())
            return response.status, json.loads(response.body)

        expected = encode("hello")
        answer = {"tokens": expected, "count": 5, "max_model_len": 512}
        assert await ask(prompt="hello") == (200, answer)
        _, chat = await ask(messages=[{"role": "user", "content": "hi"}])
        assert chat["tokens"] == encode("<s>user:hi<s>assistant:")
        for wrong in ({}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}):
            assert (await ask(**wrong))[0] == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template", "{{ messages }}"),
        ("documents", [{"title": "a", "text": "b"}]),
        ("functions", [{"name": "f"}]),
        ("mm_processor_kwargs", {"a": 1}),
        ("truncate_prompt_tokens", 1),
    ],
)
async def test_tokenize_refuses_what_would_change_the_tokens(frontend, scripted, post, name, value):
    async with frontend(scripted("a")) as (app, _):
        for prompt in ({"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}):
            response = await post(
                f"{app.url}/tokenize", json.dumps({**prompt, name: value}).encode()
            )
            assert response.status == 400
            assert json.loads(response.body)["error"]["param"] == name
            response = await post(
                f"{app.url}/tokenize", json.dumps({**prompt, name: None}).encode()
            )
            assert response.status == 200


async def test_tokenize_with_and_without_special_tokens(
    frontend, scripted, post, encode, tokenizer_dir, tmp_path
):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 257), ("</s>", 256)]
    )
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    engine = scripted("a", tokenizer=str(tmp_path))
    async with frontend(engine) as (app, client):

        async def ask(**body):
            response = await post(f"{app.url}/tokenize", json.dumps(body).encode())
            return json.loads(response.body)["tokens"]

        def around(tokens):
            return [257, *tokens, 256]

        text = encode("hi")
        assert await ask(prompt="hi") == around(text)
        assert await ask(prompt="hi", add_special_tokens=None) == around(text)
        assert await ask(prompt="hi", add_special_tokens=True) == around(text)
        assert await ask(prompt="hi", add_special_tokens=False) == text
        for content in ("hi", "a</s>b"):  # the latter spells a control token but stays text
            messages = [{"role": "user", "content": content}]
            chat = await ask(messages=messages)
            assert 256 not in chat
            assert await ask(messages=messages, add_special_tokens=False) == chat
            assert await ask(messages=messages, add_special_tokens=True) == around(chat)
            used = await client.chat.completions.create(model="tiny", messages=messages)
            assert used.usage.prompt_tokens == len(chat)
        messages = [{"role": "user", "content": "hi"}]
        for arguments, chat in [
            (
                {"chat_template_kwargs": {"reasoning_effort": "low"}},
                "effort low<s>user:hi<s>assistant:",
            ),
            ({"add_generation_prompt": False}, "<s>user:hi"),
            ({"continue_final_message": True}, "<s>user:hi"),
        ]:
            assert await ask(messages=messages, **arguments) == encode(chat)


async def test_template_variables_of_the_server(frontend, scripted, post, encode, hello):
    engine = scripted("a")
    async with frontend(engine, chat_template_kwargs={"reasoning_effort": "low"}) as (app, client):

        def chat(effort):
            return encode(f"effort {effort}<s>user:hi<s>assistant:")

        for own, expected in [
            ({}, chat("low")),
            ({"chat_template_kwargs": {"other": 1}}, chat("low")),
            ({"reasoning_effort": "high"}, chat("high")),
            ({"chat_template_kwargs": {"reasoning_effort": "high"}}, chat("high")),
            (
                {"chat_template_kwargs": {"reasoning_effort": None}},
                encode("<s>user:hi<s>assistant:"),
            ),
        ]:
            await client.chat.completions.create(**hello, extra_body=own)
            assert list(engine.submits[-1].prompt_token_ids) == expected
            body = json.dumps({**hello, **own}).encode()
            found = json.loads((await post(f"{app.url}/tokenize", body)).body)
            assert found["tokens"] == expected
        prompt = generation_pb2.ChatPrompt(messages=[{"role": "user", "content": "hi"}])
        async for _ in app.stub.Generate(generation_pb2.GenerateRequest(chat=prompt)):
            pass
        assert list(engine.submits[-1].prompt_token_ids) == chat("low")


def test_template_variables_of_the_server_have_names_of_their_own():
    settings = RouterSettings(chat_template_kwargs={"a": 1, "tools": [], "messages": []})
    with pytest.raises(SettingsError, match=r"--chat-template-kwargs may not have 'messages'"):
        Router(settings)


async def test_the_server_s_chat_template(frontend, scripted, post, encode, hello, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}|{{ tone }}{% endfor %}")
    settings = {"chat_template": file, "chat_template_kwargs": {"tone": "kind"}}
    engine = scripted("a")
    async with frontend(engine, **settings) as (app, client):
        answer = await client.chat.completions.create(**hello)
        assert list(engine.submits[-1].prompt_token_ids) == encode("hi|kind")
        found = await post(f"{app.url}/tokenize", json.dumps(hello).encode())
        assert json.loads(found.body)["count"] == answer.usage.prompt_tokens


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{% for m in messages %}\n{{ m.content }\n{% endfor %}", "not a chat template: line 2: "),
        (b"\xff", "not a chat template: .*utf-8"),
        (b" \n", "is empty"),
        (None, "No such file"),
    ],
)
def test_a_broken_chat_template_is_refused_at_the_start(tmp_path, content, why):
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(
        SettingsError, match=rf"template.jinja \(--chat-template\).*{why}"
    ) as caught:
        Router(RouterSettings(chat_template=file))
    assert "\n" not in str(caught.value)


async def test_only_the_playground_s_files_are_served(frontend, scripted, get):
    async with frontend(scripted("a")) as (app, _):
        page = await get(f"{app.url}/")
        assert page.status == 200
        assert "text/html" in page.headers["content-type"]
        policy = page.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'"} <= set(policy)
        assert not any(unsafe in rule for rule in policy for unsafe in ("unsafe", "http", "data:"))
        names = re.findall(r'"(playground/[^"]+)"', page.body.decode())
        for name in {*names, "playground/api.js", "playground/vendor/marked/marked.esm.js"}:
            file = await get(f"{app.url}/{name}")
            assert file.status == 200, name
            assert file.headers["content-security-policy"] == "; ".join(policy)
        for name in ("app.py", "..%2Fapp.py", "%2e%2e/app.py", "vendor", "vendor/../../app.py", ""):
            assert (await get(f"{app.url}/playground/{name}")).status == 404, name


def test_the_vendored_library_is_the_one_that_is_named():
    folder = PLAYGROUND / "vendor" / "marked"
    library = (folder / "marked.esm.js").read_bytes()
    readme = (folder / "README.md").read_text()
    assert hashlib.sha256(library).hexdigest() in readme
    version = re.search(rb"marked v(\S+) ", library)[1].decode()
    assert f"marked) {version}, unchanged" in readme
    assert "MIT" in (folder / "LICENSE.md").read_text()
