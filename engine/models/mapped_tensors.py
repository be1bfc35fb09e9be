"""Reads a model's tensors directly from its files, and releases the files' memory."""

import mmap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType

import torch
from torch import Tensor

from octavo.common.models.errors import ModelError
from octavo.common.models.gguf.tensor_locations import TensorLocations
from octavo.common.models.safetensors_files import TensorLocation, tensor_locations, weight_files
from octavo.engine.models.quantization.formats.base import TensorHeader

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by safetensors' names."""
LARGE = 1 << 20
"""Minimum bytes of a tensor whose memory is released."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a mapped file.

    Attributes:
        file: The file's bytes.
        place: Its location in the file.
    """

    file: mmap.mmap
    place: TensorLocation

    @property
    def header(self) -> TensorHeader:
        """The tensor's type and shape in the file."""
        return TensorHeader(self.place.dtype, self.place.shape)

    def get_shape(self) -> list[int]:
        """Return the shape, as safetensors' slices do."""
        return list(self.place.shape)

    def get_dtype(self) -> str:
        """Return the type, as safetensors' slices do."""
        return self.place.dtype

    def __getitem__(self, _: EllipsisType) -> Tensor:
        """Return the tensor, a view of the file that must not be changed.

        Raises:
            ModelError: It has a type that PyTorch lacks.
        """
        place = self.place
        if (dtype := DTYPES.get(place.dtype)) is None:
            raise ModelError(f"it has tensors of type {place.dtype}, which Octavo does not read")
        count = torch.Size(place.shape).numel()
        if not count:
            return torch.empty(place.shape, dtype=dtype)
        flat = torch.frombuffer(self.file, dtype=dtype, count=count, offset=place.offset)
        return flat.reshape(place.shape)

    def give_back(self) -> None:
        """Return a large tensor's memory to the system; later uses read it again."""
        size = torch.Size(self.place.shape).numel() * DTYPES[self.place.dtype].itemsize
        first = -(-self.place.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (self.place.offset + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if size >= LARGE and length > 0:
            with suppress(OSError):
                self.file.madvise(mmap.MADV_DONTNEED, first, length)


def open_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model's files by name, without reading them yet.

    Raises:
        ModelError: A file is absent, damaged or has changed.
        OSError: A file cannot be opened.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        file = _mapped(path)
        tensors |= {
            name: StoredTensor(file, place) for name, place in tensor_locations(path).items()
        }
    places = TensorLocations.read(directory)
    maps = [_mapped(Path(path)) for path, _ in places.files]
    for name, (number, place) in places.tensors.items():
        tensors[name] = StoredTensor(maps[number], place)
    return tensors


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        # A private mapping: changes in memory do not reach the file.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
