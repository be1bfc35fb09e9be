"""One engine that a router reaches at two addresses."""

from contextlib import asynccontextmanager

import pytest

from octavo.v1 import generation_pb2


@pytest.fixture
def twice(serve):
    """Start a router with one engine at two connected addresses; yield the router and addresses."""

    @asynccontextmanager
    async def start(engine):
        await engine.start()
        other = engine.address.replace("127.0.0.1", "localhost")
        async with serve(engine, addresses=[other]) as app:
            await app.until(lambda: len(engine.outboxes) == 2)
            await app.until(lambda: all(link.up for link in app.router.pool.links))
            yield app, app.router.pool

    return start


async def ask(app) -> str:
    call = app.stub.Generate(generation_pb2.GenerateRequest(text="hi"))
    return "".join([response.delta.text async for response in call])


async def test_an_engine_is_counted_once(scripted, twice):
    async with twice(scripted(instance_id="one")) as (app, pool):
        (model,) = (await app.stub.ListModels(generation_pb2.ListModelsRequest())).models
        assert (model.engines, model.total_blocks, model.free_blocks) == (1, 256, 256)
        used = {link.address for link in pool.used}
        for _ in range(4):
            assert await ask(app) == "hello world"
            assert {link.address for link in pool.used} == used
        assert len(pool.candidates("tiny")) == 1


async def test_engines_that_do_not_say_who_they_are_are_two(scripted, twice):
    async with twice(scripted()) as (_, pool):
        assert len(pool.up("tiny")) == 2


async def test_the_other_address_replaces_one_that_is_lost(scripted, twice):
    async with twice(scripted(instance_id="one")) as (app, pool):
        (link,) = pool.used
        await pool.remove(link.address)
        (other,) = pool.used
        assert other.address != link.address
        assert await ask(app) == "hello world"


async def test_the_other_address_replaces_one_that_is_drained(scripted, twice):
    async with twice(scripted(instance_id="one")) as (app, pool):
        (link,) = pool.used
        pool.drain(link.address)
        (other,) = pool.candidates("tiny")
        assert other.address != link.address
        assert await ask(app) == "hello world"
        pool.drain(other.address)
        with pytest.raises(Exception, match="no engine is up"):
            pool.candidates("tiny")
