"""Files and batches with OpenAI's client; the engine is scripted."""

import asyncio
import json

import httpx2
import openai
import pytest

from octavo.offline import batch as batch_module
from octavo.offline.batch import Batch
from octavo.router.tenants.tenant import hash_key


def line(number: int, **body) -> str:
    body = {"model": "tiny", "prompt": f"{number}", "max_tokens": 9, **body}
    asked = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(asked) + "\n"


async def upload(client, lines) -> str:
    content = ("in.jsonl", "".join(lines).encode())
    return (await client.files.create(file=content, purpose="batch")).id


async def begin(client, lines) -> str:
    file_id = await upload(client, lines)
    batch = await client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h",
        metadata={"a": "b"},
    )  # fmt: skip
    return batch.id


async def ended(client, batch_id: str):
    for _ in range(400):
        batch = await client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "cancelled", "expired"):
            return batch
        await asyncio.sleep(0.05)
    raise AssertionError(batch)


async def results(client, file_id: str) -> list[dict]:
    return list(map(json.loads, (await client.files.content(file_id)).text.splitlines()))


async def test_a_batch_from_upload_to_results(frontend, scripted, tmp_path):
    engine = scripted("ok")
    async with frontend(engine, batch_dir=tmp_path / "batches") as (app, client):
        lines = [line(0), line(1, temperature=-1), "{no JSON\n", line(3, priority=9), "\n"]
        batch = await ended(client, await begin(client, lines))
        assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (4, 2, 2)
        answers = await results(client, batch.output_file_id)
        assert [each["custom_id"] for each in answers] == ["r0", "r3"]
        assert answers[0]["response"]["body"]["choices"][0]["text"] == "ok"
        wrong = await results(client, batch.error_file_id)
        assert wrong[0]["response"]["status_code"] == 400
        assert "not JSON" in wrong[1]["error"]["message"]
        assert {submit.priority for submit in engine.submits} == {-100}
        assert [each.id async for each in client.batches.list()] == [batch.id]
        listed = [each async for each in client.files.list(limit=1)]
        assert {each.id for each in listed} == {
            batch.input_file_id, batch.output_file_id, batch.error_file_id
        }  # fmt: skip
        assert [each.id async for each in client.files.list(purpose="batch")] == [
            batch.input_file_id
        ]
        shown = await client.files.retrieve(batch.output_file_id)
        assert shown.bytes == sum(len(json.dumps(each, ensure_ascii=False)) + 1 for each in answers)
        for each in listed:
            assert (await client.files.delete(each.id)).deleted
        assert not list((tmp_path / "batches").glob("*.jsonl"))
        await app.clean()


async def test_a_batch_goes_on_after_a_restart(frontend, scripted, tmp_path):
    engine = scripted("ok", interval=0.01)
    settings = {"batch_dir": tmp_path, "batch_in_flight": 2}
    async with frontend(engine, **settings) as (app, client):
        batch_id = await begin(client, map(line, range(40)))
        await app.until(lambda: len(engine.submits) > 10)
    asked = len(engine.submits)
    assert asked < 40
    again = scripted("ok")
    async with frontend(again, **settings) as (_, client):
        batch = await ended(client, batch_id)
        assert batch.request_counts.completed == 40
        answers = await results(client, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"r{number}" for number in range(40)]
    assert len(again.submits) < 40


async def test_a_batch_is_cancelled(frontend, scripted, tmp_path):
    engine = scripted("ok", interval=0.01)
    async with frontend(engine, batch_dir=tmp_path, batch_in_flight=2) as (app, client):
        first = await begin(client, map(line, range(1000)))
        second = await begin(client, [line(0)])  # waits for its turn
        await app.until(lambda: len(engine.submits) > 10)
        with pytest.raises(openai.BadRequestError, match="input of a batch"):
            await client.files.delete((await client.batches.retrieve(first)).input_file_id)
        assert (await client.batches.cancel(first)).status in ("cancelling", "cancelled")
        batch = await ended(client, first)
        assert batch.status == "cancelled"
        assert (
            len(await results(client, batch.output_file_id)) == batch.request_counts.completed > 0
        )
        assert (await client.batches.cancel(first)).status == "cancelled"
        assert (await ended(client, second)).status == "completed"
        await app.clean()


async def test_tenants_see_only_their_own(frontend, scripted, tmp_path):
    tenants = tmp_path / "tenants.toml"
    keys = {"ann": "key-a", "bob": "key-b"}
    tenants.write_text("".join(f'[{n}]\nkeys = ["{hash_key(k)}"]\n' for n, k in keys.items()))
    settings = {"batch_dir": tmp_path / "batches", "tenants": tenants}
    async with frontend(scripted("ok"), key="key-a", **settings) as (_, ann):
        bob = ann.with_options(api_key="key-b")
        batch = await ended(ann, await begin(ann, [line(0)]))
        assert batch.status == "completed"
        for call in (
            bob.files.retrieve(batch.output_file_id),
            bob.files.content(batch.output_file_id),
            bob.files.delete(batch.input_file_id),
            bob.batches.retrieve(batch.id),
            bob.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.BadRequestError, match="is no file"):
            await bob.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions",
                completion_window="24h",
            )  # fmt: skip
        assert [each async for each in bob.files.list()] == []
        assert [each async for each in bob.batches.list()] == []
        with pytest.raises(openai.AuthenticationError):
            await ann.with_options(api_key="key-c").files.create(file=b"x", purpose="batch")


async def test_what_is_wrong_is_named(frontend, scripted, tmp_path, post):
    engine = scripted("ok")
    async with frontend(engine, batch_dir=tmp_path, batch_space=1e-4) as (app, client):
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=b"x", purpose="fine-tune")
        with pytest.raises(
            openai.APIStatusError, match="exceeds the router's --batch-space"
        ) as caught:
            await client.files.create(file=b"x" * 200_000, purpose="batch")
        assert caught.value.status_code == 413
        answer = await post(f"{app.url}/v1/files", b"{}")
        assert answer.status == 415
        kind = "multipart/form-data; boundary=x"
        for form in (b"", b"--x\r\n", b"--x\r\nA: b\r\n\r\nc\r\n--x--\r\n", b"--y", b"--x\r\n" * 9):
            assert (await post(f"{app.url}/v1/files", form, kind=kind)).status == 400, form
        assert not list(tmp_path.glob("*.jsonl"))
        file_id = await upload(client, ["\n"])
        for wrong in ({"endpoint": "/v1/files"}, {"completion_window": "1h"}):
            asked = {"endpoint": "/v1/completions", "completion_window": "24h", **wrong}
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                await client.batches.create(input_file_id=file_id, **asked)
        batch = await ended(client, await begin(client, ["\n"]))
        assert (batch.status, batch.errors.data[0].code) == ("failed", "empty_file")
        other = {"custom_id": "a", "url": "/v1/files", "body": {}}
        batch = await ended(client, await begin(client, [json.dumps(other)]))
        (wrong,) = await results(client, batch.error_file_id)
        assert "/v1/completions, the batch's endpoint" in wrong["error"]["message"]


async def test_without_a_directory_they_are_off(frontend, scripted):
    async with frontend(scripted("ok")) as (_, client):
        with pytest.raises(openai.NotFoundError, match="--batch-dir"):
            await client.files.create(file=b"x", purpose="batch")
        with pytest.raises(openai.NotFoundError, match="--batch-dir"):
            await client.batches.retrieve("a")


async def test_a_request_that_a_paused_machine_sent_too_late_is_sent_again(monkeypatch):
    monkeypatch.setattr(batch_module, "RETRY_SECONDS", 0.01)
    answers = [b"408 Request Timeout", b"408 Request Timeout", b"200 OK", b"400 Bad Request"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(
            b"HTTP/1.1 %b\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}" % answers.pop(0)
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        batch = Batch(client, 1)
        found = [await batch._complete(line(i).encode()) for i in range(2)]
    assert [each["response"]["status_code"] for each in found] == [200, 400]
