"""An engine of a byte model that serves vLLM's contract over real gRPC."""

import asyncio
import threading
from contextlib import asynccontextmanager
from importlib.util import find_spec
from types import SimpleNamespace

import grpc
import pytest
from tokenizers import Tokenizer

from benchmarks.fixture import make_model
from octavo.common.listening import listen
from octavo.common.rpc import create_server
from octavo.common.tracing import Tracing
from octavo.engine.metrics import EngineMetrics
from octavo.engine.rpc.served_engine import ServedEngine
from octavo.engine.rpc.service_registry import ServiceRegistry
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build

collect_ignore_glob = [] if find_spec("smg_grpc_proto") else ["test_*.py"]
"""Nothing without the extra `smg`."""

SMALL = {
    "dtype": "float32",
    "compile": "off",
    "num_blocks": 256,
    "max_model_len": 1024,
    "swap_space": 0,
}


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def tokenizer(byte_model):
    return Tokenizer.from_file(f"{byte_model}/tokenizer.json")


@asynccontextmanager
async def serving(model, **settings):
    """Serve a model; at the end, check that no block is in use."""
    from smg_grpc_proto import vllm_engine_pb2_grpc

    settings = EngineSettings(model=model, **SMALL | settings)
    metrics = EngineMetrics(settings.metrics_names)
    services = ServiceRegistry(settings, metrics)
    server, _ = await create_server(services.by_name, max_message_bytes=1 << 24)
    address = listen(server, "127.0.0.1", 0, None)
    await server.start()
    parts = build(settings)
    engine = ServedEngine(settings, parts, metrics, Tracing(None, ""))
    thread = threading.Thread(target=engine.core.run, daemon=True)
    thread.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        yield SimpleNamespace(
            stub=stub,
            channel=channel,
            core=engine.core,
            cache=parts.scheduler.cache,
            start=lambda: services.start(engine),
            metrics=metrics,
        )
    await server.stop(None)
    engine.core.stop()
    await asyncio.to_thread(thread.join)
    parts.scheduler.cache.check_idle()


@pytest.fixture
async def engine(byte_model):
    async with serving(byte_model) as engine:
        engine.start()
        yield engine
