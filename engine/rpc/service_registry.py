"""The gRPC services of an engine, which answer before its model is loaded."""

from collections.abc import Callable, Mapping
from functools import partial

import grpc

from octavo.engine.metrics import EngineMetrics
from octavo.engine.rpc.served_embedder import ServedEmbedder
from octavo.engine.rpc.served_engine import ServedEngine
from octavo.engine.rpc.service import EngineService
from octavo.engine.rpc.vllm import SERVICE as VLLM_SERVICE
from octavo.engine.rpc.vllm import vllm_service
from octavo.engine.settings import EngineSettings
from octavo.v1 import engine_pb2, engine_pb2_grpc

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name


class ServiceRegistry:
    """Octavo's service, and vLLM's where its contract is installed.

    Attributes:
        by_name: Full name of each, and the call that adds it to a server.
    """

    def __init__(self, settings: EngineSettings, metrics: EngineMetrics) -> None:
        self._octavo = EngineService()
        self._vllm = vllm_service(settings, metrics)
        add = engine_pb2_grpc.add_EngineServiceServicer_to_server
        self.by_name: Mapping[str, Callable[[grpc.aio.Server], None]] = {
            SERVICE: partial(add, self._octavo)
        }
        if self._vllm is not None:
            self.by_name = {**self.by_name, VLLM_SERVICE: self._vllm.add_to}

    def start(self, engine: ServedEngine | ServedEmbedder) -> list[str]:
        """Begin to serve, as the model is loaded; return the names of the services that do."""
        self._octavo.loaded = engine
        if self._vllm is None or isinstance(engine, ServedEmbedder):
            return [SERVICE]
        self._vllm.attach(engine)
        return [SERVICE, VLLM_SERVICE]
