"""Locations of a model's weights that are read from its GGUF file unchanged.

Matrices stay in the GGUF file as blocks or floats, at the places that `FILE` in the model's
directory lists; other weights are in the directory's safetensors files.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.common.models.errors import ModelError
from octavo.common.models.safetensors_files import TensorLocation

BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""GGUF types for which kernels exist."""
FLOAT_TYPES = ("F32", "F16", "BF16")
"""GGUF's float types, which have the same names in safetensors."""
BLOCKS, ORDER = ".blocks", ".order"
"""Suffixes of a layer's tensor names: its raw blocks, and the order of its rows."""
WEIGHT = ".weight"
METHOD = "gguf"
FILE = "gguf.json"


@dataclass(frozen=True, slots=True)
class TensorLocations:
    """Locations of a model's tensors in its files.

    Attributes:
        files: Paths and sizes of the files.
        tensors: Number of the file and location in it, by tensor name.
    """

    files: tuple[tuple[str, int], ...]
    tensors: Mapping[str, tuple[int, TensorLocation]]

    def types(self) -> dict[str, str]:
        """Return the type of each tensor, like `tensor_types`."""
        return {name: place.dtype for name, (_, place) in self.tensors.items()}

    def write(self, directory: Path) -> None:
        """Write the locations to a model's directory."""
        tensors = {name: [file, asdict(place)] for name, (file, place) in self.tensors.items()}
        content = {"files": self.files, "tensors": tensors}
        (directory / FILE).write_text(json.dumps(content) + "\n")

    @classmethod
    def read(cls, directory: Path) -> "TensorLocations":
        """Read the locations in a model's directory; None for most directories.

        Only directories in the cache are read: others could refer to any file.

        Raises:
            ModelError: A file is missing, or its size has changed.
        """
        if not (directory / FILE).is_file():
            return cls((), {})
        from octavo.common.models.cache import cache_dir  # noqa: PLC0415 - in an extra

        if directory.resolve().parent != cache_dir().resolve():
            return cls((), {})
        content = json.loads((directory / FILE).read_text())
        files = tuple((str(path), int(size)) for path, size in content["files"])
        for path, size in files:
            if not Path(path).is_file() or Path(path).stat().st_size != size:
                raise ModelError(f"{path}, the source of {directory}, is missing or has changed")
        tensors = {
            name: (
                int(file),
                TensorLocation(location["offset"], location["dtype"], tuple(location["shape"])),
            )
            for name, (file, location) in content["tensors"].items()
        }
        return cls(files, tensors)


def relocate(directory: Path, paths: Sequence[Path]) -> None:
    """Update the paths of a model's files that were moved; their contents are unchanged.

    Args:
        directory: The model's directory.
        paths: Paths of the files, in order.
    """
    where = directory / FILE
    if not where.is_file():
        return
    content: dict[str, Any] = json.loads(where.read_text())
    names = [str(path) for path in paths]
    if [path for path, _ in content["files"]] != names:
        content["files"] = [[str(path), path.stat().st_size] for path in paths]
        made = where.with_name(f"{FILE}.new")
        made.write_text(json.dumps(content) + "\n")
        made.replace(where)
