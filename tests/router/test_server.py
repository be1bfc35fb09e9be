import asyncio
import os
import signal

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.router.server import serve
from octavo.router.settings import RouterSettings
from octavo.v1 import generation_pb2, generation_pb2_grpc


class Process:
    """`serve` in this process, and a client of it."""

    def __init__(self, engine, **settings):
        ready = asyncio.get_running_loop().create_future()
        options = {"port": 0, "metrics_port": 0, **settings}
        self.ready = ready
        self.task = asyncio.create_task(
            serve(RouterSettings(engine=[engine], **options), on_ready=ready.set_result)
        )

    async def __aenter__(self):
        await asyncio.wait([self.ready, self.task], return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            await self.task
        self.channel = grpc.aio.insecure_channel(self.ready.result())
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        async with asyncio.timeout(60):  # the first router of a process imports transformers
            while not (await self.stub.ListModels(generation_pb2.ListModelsRequest())).models:
                await asyncio.sleep(0.02)
        return self

    async def __aexit__(self, *_):
        await self.channel.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def generate(self):
        return self.stub.Generate(generation_pb2.GenerateRequest(text="hi"))


async def test_sigterm_finishes_running_requests_and_refuses_new_ones(scripted):
    engine = await scripted("a long answer " * 5, interval=0.01).start()
    async with Process(engine.address) as process:
        running = process.generate()
        first = await running.read()
        assert first.HasField("accepted")
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await process.generate().read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        text = ""
        while (response := await running.read()) is not grpc.aio.EOF:
            text += response.delta.text
        assert text == "a long answer " * 5
        await asyncio.wait_for(process.task, 5)
    await engine.kill()


async def test_grpc_clients_leave_a_draining_router(scripted):
    """GOAWAY asks them to, after --drain-delay; the health service reports it at once."""
    engine = await scripted("a long answer " * 10, interval=0.01).start()
    async with Process(engine.address, drain_delay=0.5) as process:
        watching = health_pb2_grpc.HealthStub(process.channel).Watch(
            health_pb2.HealthCheckRequest()
        )
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        async with grpc.aio.insecure_channel(
            process.ready.result(), options=[("grpc.use_local_subchannel_pool", 1)]
        ) as idle:
            await idle.channel_ready()
            os.kill(os.getpid(), signal.SIGTERM)
            assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            running = process.generate()
            await running.read()
            await asyncio.wait_for(idle.wait_for_state_change(grpc.ChannelConnectivity.READY), 5)
            text = ""
            while (response := await running.read()) is not grpc.aio.EOF:
                text += response.delta.text
            assert text == "a long answer " * 10
            await asyncio.wait_for(process.task, 5)
    await engine.kill()


async def test_requests_left_at_the_drain_timeout_fail(scripted):
    engine = await scripted(interval=None).start()
    async with Process(engine.address, drain_timeout=0.2) as process:
        running = process.generate()
        waiting = asyncio.create_task(running.read())
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError, match="shut down before") as caught:
            await asyncio.wait_for(waiting, 5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(process.task, 5)
    await engine.kill()


async def test_second_signal_does_not_wait(scripted):
    engine = await scripted(interval=None).start()
    async with Process(engine.address, drain_timeout=60) as process:
        waiting = asyncio.create_task(process.generate().read())
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert not process.task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError, match="shut down before"):
            await asyncio.wait_for(waiting, 5)
        await asyncio.wait_for(process.task, 5)
    await engine.kill()


async def test_no_task_is_left_behind(scripted):
    engine = await scripted().start()
    async with Process(engine.address) as process:
        call = process.generate()
        while await call.read() is not grpc.aio.EOF:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(process.task, 5)
        names = {task.get_name() for task in asyncio.all_tasks()}
    await engine.kill()
    assert not [name for name in names if name.startswith(("engine:", "session", "health"))]


@pytest.mark.parametrize("engines", [[], ["nowhere"], ["h:0"], ["h:1", "h:1"]])
def test_engine_addresses_are_checked(engines):
    with pytest.raises(ValueError, match="engine"):
        RouterSettings(engine=engines)
