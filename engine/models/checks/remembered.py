"""Caches the results of transformers' forward pass of a large model across starts.

The pass takes longer than the rest of a start. It depends only on the files, the libraries and this
code; after a change of these it runs again.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from octavo.common.models import cache as model_cache
from octavo.engine.models.checks.reference import Reference
from octavo.engine.models.fingerprint import fingerprint

FOLDER = "references"
MAX_REMEMBERED = 16
"""Maximum cached models, the latest ones. Each takes a few megabytes."""


def place_of(directory: Path, settings: Mapping[str, object]) -> Path:
    """Return the cache file of a model with these settings; it may not exist yet.

    Args:
        directory: The model's directory.
        settings: More settings that affect the outcome of its checks.
    """
    name = fingerprint(directory, settings)
    return model_cache.cache_dir() / FOLDER / f"{name}.safetensors"


def recall(place: Path) -> Reference | None:
    """Return the cached reference; None if there is none."""
    try:
        reference = Reference.load(place)
        os.utime(place)
    except Exception:  # noqa: BLE001 - safetensors has its own errors
        return None
    return reference


def remember(place: Path, reference: Reference) -> None:
    """Cache the reference of a model that passed its checks; remove the oldest."""
    with suppress(OSError):  # a full or read-only cache only costs time
        place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        made = place.with_suffix(f".{os.getpid()}")
        reference.save(made)
        made.replace(place)
        kept = sorted(place.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in kept[MAX_REMEMBERED:]:
            old.unlink(missing_ok=True)
