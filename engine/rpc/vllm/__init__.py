"""vLLM's gRPC service beside Octavo's own, for gateways that drive vLLM engines.

The contract is `vllm.grpc.engine.VllmEngine` of the package `smg-grpc-proto` (extra `smg`). Where
the package is installed the engine serves it, on the same port and to the same peers, so there is
no flag: it lets nobody in whom EngineService does not, and costs nothing that nobody calls.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from octavo.engine.metrics import EngineMetrics
from octavo.engine.settings import EngineSettings

if TYPE_CHECKING:
    from octavo.engine.rpc.vllm.service import VllmEngineService

SERVICE = "vllm.grpc.engine.VllmEngine"


def vllm_service(settings: EngineSettings, metrics: EngineMetrics) -> "VllmEngineService | None":
    """Return the service, for a model that is to be loaded; None without the package."""
    if find_spec("smg_grpc_proto") is None:
        return None
    from octavo.engine.rpc.vllm.service import VllmEngineService  # noqa: PLC0415 - an extra

    return VllmEngineService(settings, metrics)
