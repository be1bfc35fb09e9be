"""The adapters of a step on other ranks, which know them by numbers that rank 0 gives."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from weakref import WeakKeyDictionary, finalize

import numpy as np
import structlog

from octavo.engine.lora.adapter import Adapter, AdapterRegistry
from octavo.engine.lora.device_adapters import DeviceAdapters
from octavo.engine.lora.errors import AdapterError
from octavo.kernels.low_rank import StepAdapters

NO_ADAPTER = -1
DIGITS = 15
"""Hexadecimal digits of an adapter's digest that ranks compare: they fit into an int64."""

log = structlog.get_logger(__name__)


def mark(adapter: Adapter) -> int:
    """Return a positive number that tells an adapter's files from others."""
    return 1 + int(adapter.digest[:DIGITS], 16)


class AdapterNumbers:
    """The numbers of rank 0's adapters."""

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Adapter, int] = WeakKeyDictionary()
        self._dropped: list[int] = []
        self._next = count()

    def add(self, adapter: Adapter) -> int:
        """Give an adapter a number, and return it."""
        number = self._numbers[adapter] = next(self._next)
        finalize(adapter, self._dropped.append, number)
        return number

    def find(self, adapter: object) -> int:
        """Return an adapter's number; `NO_ADAPTER` for none."""
        return self._numbers[adapter] if isinstance(adapter, Adapter) else NO_ADAPTER

    def take_dropped(self) -> list[int]:
        """Return the numbers of the adapters that nobody uses since the last call."""
        return [self._dropped.pop() for _ in range(len(self._dropped))]


class FollowerAdapters:
    """The adapters of a rank other than 0.

    Args:
        registry: Reads adapters.
        device: The adapters on the device.
    """

    def __init__(self, registry: AdapterRegistry, device: DeviceAdapters) -> None:
        self._registry = registry
        self._device = device
        self._adapters: dict[int, Adapter] = {}

    def load(self, number: int, path: Path) -> int:
        """Read an adapter; return its `mark`, or 0 if it cannot be served."""
        try:
            adapter = self._adapters[number] = self._registry.read("", path)
        except AdapterError as error:
            log.warning("a rank refuses an adapter", path=str(path), reason=str(error))
            return 0
        return mark(adapter)

    def drop(self, numbers: Sequence[int]) -> None:
        """Drop adapters that no later step uses."""
        for number in numbers:
            self._adapters.pop(number, None)

    def lay_out(self, spans: Sequence[tuple[int, int]], rows: np.ndarray) -> StepAdapters | None:
        """Return the adapters of a batch; see `DeviceAdapters.lay_out`.

        Args:
            spans: The number of each sequence's adapter, and its tokens in the batch.
            rows: The tokens whose logits are needed.
        """
        found = [(self._adapters.get(number), tokens) for number, tokens in spans]
        return self._device.lay_out(found, rows)
