"""Loaded adapters, and the names that requests use for them."""

import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.common import resources
from octavo.engine.lora.errors import AdapterError
from octavo.engine.lora.targets import Targets
from octavo.engine.lora.weights import AdapterWeights, read_adapter

MEMORY_SHARE = 0.5
"""Maximum share of the free memory that loading an adapter may take."""
COPIES = 4
"""Maximum copies of an adapter's file in memory while loading: a 16-bit file is widened to float32
and converted."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """An adapter in memory. Requests hold a reference, so it may be unloaded while they run.

    Attributes:
        name: The model name in requests.
        path: Its directory.
        weights: Its matrices.
    """

    name: str
    path: Path
    weights: AdapterWeights

    @property
    def digest(self) -> str:
        """The digest of its files."""
        return self.weights.digest

    @property
    def nbytes(self) -> int:
        """The size of its matrices, in bytes."""
        return self.weights.matrices.nbytes


class AdapterRegistry:
    """The adapters that requests may name.

    Args:
        targets: The layers that adapters may adapt.
        taken: Names that no adapter may have: the model's own.
        limit: Maximum bytes of adapters on the device; None: no limit.
    """

    def __init__(self, targets: Targets, taken: Collection[str], limit: int | None = None) -> None:
        self._targets = targets
        self._taken = taken
        self._limit = limit
        self._adapters: dict[str, Adapter] = {}
        self._loading = threading.Lock()

    def __iter__(self) -> Iterator[Adapter]:
        return iter(sorted(self._adapters.values(), key=lambda adapter: adapter.name))

    def __contains__(self, name: str) -> bool:
        return name in self._taken or name in self._adapters

    def find(self, name: str) -> Adapter | None:
        """Return the adapter of a name; None if there is none."""
        return self._adapters.get(name)

    def read(self, name: str, path: Path) -> Adapter:
        """Read an adapter; any thread may call this. It reads one adapter at a time.

        Raises:
            AdapterError: The adapter cannot be served; the message says why.
        """
        with self._loading:
            try:
                _check_memory(path)
            except OSError as error:
                raise AdapterError(f"{path} cannot be read: {error}") from error
            adapter = Adapter(name, path, read_adapter(path, self._targets))
        if self._limit is not None and adapter.nbytes > self._limit:
            raise AdapterError(
                f"{path} takes {adapter.nbytes >> 20} MiB on the device, where adapters have"
                f" {self._limit >> 20} MiB: raise --adapter-memory"
            )
        return adapter

    def add(self, adapter: Adapter) -> None:
        """Register an adapter, so that requests can name it.

        Raises:
            AdapterError: Its name is taken.
        """
        if adapter.name in self:
            raise AdapterError(f"the name {adapter.name!r} is taken: unload that adapter first")
        self._adapters[adapter.name] = adapter

    def remove(self, name: str) -> Adapter | None:
        """Remove an adapter, and return it; its running requests keep it."""
        return self._adapters.pop(name, None)


def _check_memory(directory: Path) -> None:
    """Refuse an adapter that does not fit in memory."""
    needed = COPIES * sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    available = resources.memory().available
    if needed > MEMORY_SHARE * available:
        raise AdapterError(
            f"{directory} needs {needed >> 20} MiB to load, and {available >> 20} MiB are free:"
            " unload other adapters"
        )
