"""The description that routers and metrics get of any loaded engine."""

from octavo.common.topology import format_list
from octavo.common.version import own_version
from octavo.engine.metrics import EngineMetrics
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import Parts
from octavo.engine.startup.build_embedder import EmbedderParts
from octavo.v1 import engine_pb2


def engine_info(
    settings: EngineSettings, parts: Parts | EmbedderParts, instance_id: str
) -> engine_pb2.GetEngineInfoResponse:
    """Return the fields that do not depend on what the engine makes of texts, without the load."""
    return engine_pb2.GetEngineInfoResponse(
        model=settings.model_name,
        aliases=settings.model_names[1:],
        instance_id=instance_id,
        tokenizer=settings.source,
        max_num_seqs=parts.max_num_seqs,
        max_num_batched_tokens=parts.max_num_batched_tokens,
        version=own_version(),
        device=parts.device,
        dtype=parts.dtype,
        kernels=parts.kernels,
        warnings=parts.warnings,
        threads=parts.threads.count,
        cpus=format_list(parts.threads.cpus),
        numa_nodes=parts.threads.nodes,
        ranks=parts.ranks,
    )


def show_info(metrics: EngineMetrics, info: engine_pb2.GetEngineInfoResponse) -> None:
    """Show an engine's description in its metrics."""
    names = ("instance_id", "version", "model", "device", "dtype", "threads", "cpus", "kernels")
    described = {name: str(getattr(info, name)) for name in names}
    metrics.info.info(described | {"numa_nodes": format_list(info.numa_nodes)})
    metrics.ranks.set(info.ranks)
