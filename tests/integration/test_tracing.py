"""Requests' spans from router and engine processes, as a collector receives them."""

import asyncio
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks import fixture
from benchmarks.metrics import Metrics
from octavo import AsyncClient, Error
from octavo.common.ports import free_port

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE}-{CALLER}-01"),)
NOT_SAMPLED = (("traceparent", f"00-{TRACE}-{CALLER}-00"),)
PROMPT = "a secret that no trace may tell"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects spans, and returns them as trees."""

    def __init__(self):
        self.exports = []

    def Export(self, request, context):  # noqa: N802
        self.exports.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self):
        return [
            span
            for export in self.exports
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def tree(self, parent: str = CALLER):
        """Return a span's descendants as nested names, in order of time."""
        below = defaultdict(list)
        for span in sorted(self.spans, key=lambda span: span.start_time_unix_nano):
            below[span.parent_span_id.hex()].append(span)

        def names(identity):
            return [(span.name, names(span.span_id.hex())) for span in below[identity]]

        return names(parent)

    def named(self, name: str):
        return [span for span in self.spans if span.name == name]


def attributes(span) -> dict:
    values = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        values[pair.key] = (
            [v.string_value for v in value.values] if kind == "array_value" else value
        )
    return values


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return fixture.make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def collector():
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    server.stop(0)


@asynccontextmanager
async def traced(collector, model, *, engines: int = 1, **settings):
    """Start a router and its engines; yield a client of the router. The end flushes all spans."""
    async with AsyncExitStack() as stack:
        nodes = []
        for _ in range(engines):
            port = free_port()
            node = fixture.engine(
                model, otlp_endpoint=collector.endpoint, metrics_port=port, **settings
            )
            node.metrics_port = port
            stack.push_async_callback(node.close)
            nodes.append(await node.start())
        router = fixture.router([node.address for node in nodes], otlp_endpoint=collector.endpoint)
        stack.push_async_callback(router.close)
        await router.start()
        await fixture.all_up(router, engines)
        client = AsyncClient(router.address, metadata=SAMPLED)
        yield await stack.enter_async_context(client), nodes


async def test_a_request(collector, model):
    async with traced(collector, model) as (client, _):
        await client.generate(
            PROMPT, request_id="mine", max_tokens=5, min_tokens=5, temperature=0.5, seed=2**64 - 1
        ).text()
        with pytest.raises(Error):
            await client.generate("", request_id="wrong").text()
        async with AsyncClient(client.address, metadata=NOT_SAMPLED) as untraced:
            await untraced.generate(PROMPT, max_tokens=2).text()
    engine = ("request", [("queue", []), ("prefill", []), ("decode", [])])
    assert collector.tree() == [
        ("Generate", [("queue", []), ("engine", [engine])]),
        ("Generate", []),
    ]
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    served, refused = collector.named("Generate")
    common = {"gen_ai.request.model": "tiny", "gen_ai.response.id": "mine"}
    expected = {
        **common,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": str(2**64 - 1),
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.request.stream": True,
        "gen_ai.response.model": "tiny",
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "rpc.grpc.status_code": 0,
    }
    assert expected.items() <= attributes(served).items()
    assert attributes(refused)["rpc.grpc.status_code"] == 3
    assert attributes(refused)["error.type"] == "INVALID_ARGUMENT"
    assert (served.status.code, refused.status.code) == (0, 0)  # the client's error
    assert "error.type" not in attributes(served)
    (request,) = collector.named("request")
    assert {**common, "octavo.outcome": "finished"}.items() <= attributes(request).items()
    for span in collector.spans:
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    phases = [span for span in collector.spans if span.parent_span_id == request.span_id]
    assert min(p.start_time_unix_nano for p in phases) == request.start_time_unix_nano
    assert "secret" not in str(collector.exports)


async def test_a_request_that_loses_its_engine(collector, model):
    busy = None
    async with traced(collector, model, engines=2) as (client, engines):
        async for _ in client.generate(PROMPT, max_tokens=500, min_tokens=500):
            if busy is None:
                busy = await busy_one(engines)
                await busy.kill()
    engine = ("request", [("queue", []), ("prefill", []), ("decode", [])])
    assert collector.tree() == [
        (
            "Generate",
            [("queue", []), ("engine", []), ("queue", []), ("engine", [engine])],
        )
    ]
    lost, kept = sorted(collector.named("engine"), key=lambda span: span.start_time_unix_nano)
    (other,) = (engine for engine in engines if engine is not busy)
    assert [place(span) for span in (lost, kept)] == [busy.address, other.address]
    assert (lost.status.code, kept.status.code) == (2, 0)
    (call,) = collector.named("Generate")
    assert [event.name for event in call.events] == ["engine lost"]
    assert attributes(call)["octavo.migrations"] == 1


def place(span) -> str:
    """Return HOST:PORT of the server in a span."""
    named = attributes(span)
    return f"{named['server.address']}:{named['server.port']}"


async def busy_one(engines):
    """Wait for the engine that reports a request: metrics are a little late."""
    async with asyncio.timeout(10):
        while True:
            for engine in engines:
                metrics = await asyncio.to_thread(Metrics, engine.metrics_port)
                if metrics.value("octavo_engine_groups"):
                    return engine
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_requests_that_are_preempted(collector, model, mode):
    settings = {"num_blocks": 24, "max_model_len": 256, "preemption": mode, "swap_space": 0.002}
    async with traced(collector, model, **settings) as (client, _):
        await asyncio.gather(
            *(
                client.generate(PROMPT + str(i), max_tokens=200, min_tokens=200).text()
                for i in range(4)
            )
        )
    requests = collector.named("request")
    assert len(requests) == 4
    events = [event.name for request in requests for event in request.events]
    expected = {
        "swap": {"preempted: swapped out", "swapped in"},
        "recompute": {"preempted: to be recomputed"},
    }
    assert set(events) == expected[mode]
    for request in requests:
        for event in request.events:
            assert request.start_time_unix_nano <= event.time_unix_nano
            assert event.time_unix_nano <= request.end_time_unix_nano


async def test_a_collector_that_is_gone_is_no_trouble(model):
    async with AsyncExitStack() as stack:
        engine = fixture.engine(model)
        router = fixture.router([engine.address], otlp_endpoint=f"http://127.0.0.1:{free_port()}")
        for node in (engine, router):
            stack.push_async_callback(node.close)
            await node.start()
        await fixture.all_up(router, 1)
        async with AsyncClient(router.address) as client:
            await client.generate(PROMPT, max_tokens=2).text()
        await router.terminate()
        assert router.exitcode == 0
