"""Names all that a model's computed values depend on."""

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch

from octavo import kernels
from octavo.common.models.gguf.tensor_locations import TensorLocations
from octavo.kernels.cpu_target import cpu_identity

CODE = Path(__file__).resolve().parents[1], Path(kernels.__file__).resolve().parent
SOURCES = {".py", ".cpp", ".h"}


def fingerprint(directory: Path, settings: Mapping[str, object]) -> str:
    """Return a name of a model's files, the settings, the libraries, the CPU and Octavo's code.

    Files are compared by name, size and modification time.

    Args:
        directory: The model's directory.
        settings: Further settings that the values depend on.
    """
    files = (file for file in directory.iterdir() if file.is_file())
    paths = [*files, *(Path(path) for path, _ in TensorLocations.read(directory).files)]
    digest = hashlib.sha256(repr(sorted(settings.items())).encode())
    for path in sorted(paths):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    for name in (torch.__version__, version("transformers"), cpu_identity()):
        digest.update(name.encode())
    for folder in CODE:
        for file in sorted(folder.rglob("*")):
            if file.suffix in SOURCES:
                digest.update(file.read_bytes())
    return digest.hexdigest()[:24]
