"""The weights of a model that are read from its GGUF file as they are, and where they are in it.

Matrices stay in the file's own blocks or floats, of which `FILE` in the model's directory says the
place; all other weights are in the directory's safetensors files.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.common.models.errors import ModelError
from octavo.common.models.weight_files import TensorLocation

BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""GGUF's types that have kernels."""
FLOAT_TYPES = ("F32", "F16", "BF16")
"""Its types of floats; safetensors calls them the same."""
BLOCKS, ORDER = ".blocks", ".order"
"""What follows a layer's name in the names of its bytes, and of its rows' numbers."""
WEIGHT = ".weight"
METHOD = "gguf"
FILE = "gguf.json"


@dataclass(frozen=True, slots=True)
class TensorLocations:
    """Where the tensors of a model are in its files.

    Attributes:
        files: The files' paths and sizes.
        tensors: The number of its file, and the place in it, of each tensor by name.
    """

    files: tuple[tuple[str, int], ...]
    tensors: Mapping[str, tuple[int, TensorLocation]]

    def types(self) -> dict[str, str]:
        """Return the type of each tensor, as `tensor_types` does."""
        return {name: place.dtype for name, (_, place) in self.tensors.items()}

    def write(self, directory: Path) -> None:
        """Write them to a model's directory."""
        tensors = {name: [file, asdict(place)] for name, (file, place) in self.tensors.items()}
        content = {"files": self.files, "tensors": tensors}
        (directory / FILE).write_text(json.dumps(content) + "\n")

    @classmethod
    def read(cls, directory: Path) -> "TensorLocations":
        """Read the locations in a model's directory; most directories have none.

        Only a directory in the cache is read: one from elsewhere could name any file.

        Raises:
            ModelError: A file is gone, or has another size.
        """
        if not (directory / FILE).is_file():
            return cls((), {})
        from octavo.common.models.cache import cache_dir  # noqa: PLC0415 - of the extras

        if directory.resolve().parent != cache_dir().resolve():
            return cls((), {})
        content = json.loads((directory / FILE).read_text())
        files = tuple((str(path), int(size)) for path, size in content["files"])
        for path, size in files:
            if not Path(path).is_file() or Path(path).stat().st_size != size:
                raise ModelError(f"{path}, of which {directory} is made, is gone or has changed")
        tensors = {
            name: (
                int(file),
                TensorLocation(location["offset"], location["dtype"], tuple(location["shape"])),
            )
            for name, (file, location) in content["tensors"].items()
        }
        return cls(files, tensors)


def relocate(directory: Path, paths: Sequence[Path]) -> None:
    """Write down where a model's files are now, if they were moved; their contents are the same.

    Args:
        directory: The model's directory.
        paths: The files' paths, in order.
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
