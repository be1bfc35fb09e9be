"""Both clients against a scripted service."""

import asyncio
import threading
import time

import grpc
import pytest

import octavo


@pytest.fixture
def client(service):
    with octavo.Client(service.address) as client:
        yield client


def wait_for_cancel(service):
    deadline = time.monotonic() + 5
    while not service.cancelled:
        assert time.monotonic() < deadline, "the call still runs"
        time.sleep(0.01)


def test_events_and_pieces(client):
    events = list(client.generate("a b", request_id="r").events())
    assert events[0] == octavo.Accepted("r", "m", 3, 0)
    first = octavo.TokenLogprob(0, -0.5, (octavo.TopLogprob(0, -0.5),))
    assert events[1] == octavo.Delta(0, "a ", (0,), (first,))
    reason, usage = octavo.FinishReason.STOP_STRING, octavo.Usage(3, 1, 2)
    assert events[-1] == octavo.Finished(0, reason, usage, "END", None)
    assert [delta.text for delta in client.generate("a b")] == ["a ", "b "]


def test_completion(client):
    completion = client.generate("a b", n=2).complete()
    assert completion.texts == ("a b ", "a b ")
    assert completion.outputs[1].token_ids == (0, 1)
    assert completion.usage == octavo.Usage(3, 1, 4)
    assert (completion.request_id, completion.model) == ("made", "m")
    assert client.generate("a b").text() == "a b "


def test_unary_calls(client):
    assert client.tokenize("one three") == (3, 5)
    assert client.detokenize([1, 2]) == "1 2"
    (model,) = client.list_models()
    assert (model.name, model.cache_use) == ("m", pytest.approx(0.6))
    assert client.is_serving()


def test_leaving_the_loop_cancels(service, client):
    service.endless = True
    for _ in client.generate("x"):
        break
    wait_for_cancel(service)


def test_the_end_of_the_block_cancels(service, client):
    service.endless = True
    with client.generate("x") as stream:
        iterator = iter(stream)
        next(iterator)
    wait_for_cancel(service)
    with pytest.raises(octavo.CancelledError):
        list(iterator)


def test_closing_from_another_thread(service, client):
    service.endless = True
    stream = client.generate("x")
    threading.Timer(0.1, stream.close).start()
    with pytest.raises(octavo.CancelledError):
        stream.complete()


def test_timeout(service, client):
    service.endless = True
    with pytest.raises(octavo.DeadlineExceededError):
        client.generate("x", timeout=0.1).complete()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, octavo.InvalidArgumentError),
        (grpc.StatusCode.NOT_FOUND, octavo.NotFoundError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, octavo.ResourceExhaustedError),
        (grpc.StatusCode.UNAVAILABLE, octavo.UnavailableError),
        (grpc.StatusCode.INTERNAL, octavo.InternalError),
        (grpc.StatusCode.UNAUTHENTICATED, octavo.UnauthenticatedError),
        (grpc.StatusCode.PERMISSION_DENIED, octavo.PermissionDeniedError),
        (grpc.StatusCode.DATA_LOSS, octavo.Error),
    ],
)
def test_errors_have_a_type(service, client, code, kind, bad_request, retry_info):
    service.fail(code, "so it goes", bad_request, retry_info)
    for call in (
        client.generate("x").complete,
        lambda: client.tokenize("x"),
        lambda: client.detokenize([1]),
        client.list_models,
    ):
        with pytest.raises(octavo.Error) as caught:
            call()
        error = caught.value
        assert type(error) is kind
        assert (error.code, error.message, error.retry_after) == (code, "so it goes", 1.5)
        assert error.violations == (octavo.FieldViolation("stop", "too many"),)


def test_nobody_there():
    with octavo.Client("127.0.0.1:1") as client:
        with pytest.raises(octavo.UnavailableError, match="connect"):
            client.list_models(timeout=5)
        assert not client.is_serving(timeout=5)


async def test_asyncio_all(service, bad_request):
    async with octavo.AsyncClient(service.address) as client:
        assert [delta.text async for delta in client.generate("a b")] == ["a ", "b "]
        assert await client.generate("a b").text() == "a b "
        assert await client.tokenize("one three") == (3, 5)
        assert await client.detokenize([1, 2]) == "1 2"
        assert [model.name for model in await client.list_models()] == ["m"]
        assert await client.is_serving()
        service.fail(grpc.StatusCode.INVALID_ARGUMENT, "no", bad_request)
        for call in (client.generate("x").complete(), client.tokenize("x"), client.list_models()):
            with pytest.raises(octavo.InvalidArgumentError) as caught:
                await call
            assert caught.value.violations[0].field == "stop"


async def test_asyncio_leaving_the_loop_cancels(service):
    service.endless = True
    async with octavo.AsyncClient(service.address) as client:
        async for _ in client.generate("x"):
            break
        await asyncio.to_thread(wait_for_cancel, service)


async def test_asyncio_closing_is_not_the_task_being_cancelled(service):
    service.endless = True
    async with octavo.AsyncClient(service.address) as client:
        stream = client.generate("x")
        asyncio.get_running_loop().call_later(0.1, stream.close)
        with pytest.raises(octavo.CancelledError):
            await stream.complete()


async def test_asyncio_cancelling_the_task_cancels_the_call(service):
    service.endless = True
    async with octavo.AsyncClient(service.address) as client:
        task = asyncio.create_task(client.generate("x").complete())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_for_cancel, service)
