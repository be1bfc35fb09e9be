"""What all ranks of an engine must have alike: its version, its model and its flags."""

import hashlib
from pathlib import Path

import torch

from octavo.common.connections import ConnectionSettings
from octavo.common.listening import TlsSettings
from octavo.common.models.json_files import CONFIG
from octavo.common.tracing_settings import TracingSettings
from octavo.common.version import own_version
from octavo.engine.settings import EngineSettings

OF_A_MACHINE = frozenset(
    {
        *(ConnectionSettings.model_fields | TlsSettings.model_fields),
        *TracingSettings.model_fields,
        *("host", "port", "metrics_port", "node_rank", "master_addr", "master_port"),
        *("peer_ca", "peer_tls_name", "model", "revision", "served_model_name", "lora"),
        *("cache_memory", "num_blocks", "gpu_memory_utilization", "swap_space"),
    }
)
"""Settings that may differ, as machines have their own: ranks keep as many blocks as the smallest
machine has room for, models are compared by their files, and adapters by their names."""
SAMPLE_BYTES = 4096


def rank_facts(settings: EngineSettings, path: Path) -> dict[str, str]:
    """Return an engine's facts, which all ranks must have alike, by name; the version is first.

    Args:
        settings: The engine's settings.
        path: The model's directory.
    """
    flags = {
        f"--{name.replace('_', '-')}": str(value)
        for name, value in settings
        if name not in OF_A_MACHINE
    }
    versions = {"version": own_version(), "PyTorch": torch.__version__}
    adapters = ", ".join(sorted(settings.adapters)) or "no adapters"
    return versions | {"a --model with the digest": _digest(path), "--lora": adapters} | flags


def _digest(path: Path) -> str:
    """Return a digest of a model's config and of samples of its weights."""
    digest = hashlib.blake2b(digest_size=6)
    config = path / CONFIG
    digest.update(config.read_bytes() if config.is_file() else b"")
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            opened.seek(size // 2)
            digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()
