"""The keys in one engine's prefix cache, from its reports."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from octavo.v1 import engine_pb2

MAX_EXPECTED = 1 << 16
"""Maximum expected keys that are not reported yet; the oldest are dropped."""


class Prefixes:
    """Keys that an engine has reported, and those of prompts that it is about to compute."""

    __slots__ = ("_expected", "_held", "_on_disk")

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._on_disk: set[int] = set()
        self._expected: OrderedDict[int, None] = OrderedDict()

    def apply(self, changes: engine_pb2.PrefixChanges) -> None:
        """Apply an engine's report."""
        self._held.update(changes.stored)
        self._held.difference_update(changes.evicted)
        self._on_disk.update(changes.disk_stored)
        self._on_disk.difference_update(changes.disk_removed)
        for key in (*changes.stored, *changes.evicted):
            self._expected.pop(key, None)

    def expect(self, keys: Iterable[int]) -> None:
        """Add keys that the engine is expected to have soon."""
        for key in keys:
            if key not in self._held:
                self._expected[key] = None
                self._expected.move_to_end(key)
        while len(self._expected) > MAX_EXPECTED:
            self._expected.popitem(last=False)

    def match(self, keys: Sequence[int]) -> int:
        """Return the number of leading keys that are assumed to be cached."""
        for count, key in enumerate(keys):
            if not self._in_memory(key):
                return count
        return len(keys)

    def held(self, keys: Sequence[int]) -> int:
        """Return the number of leading keys that the engine has reported."""
        return next((i for i, key in enumerate(keys) if key not in self._held), len(keys))

    def worth(self, keys: Sequence[int], disk_read_share: float) -> float:
        """Return how many blocks' computing the leading keys save.

        Args:
            keys: The keys.
            disk_read_share: Time to read a block from disk, as a share of computing it.
        """
        saved = 0.0
        for key in keys:
            if self._in_memory(key):
                saved += 1
            elif key in self._on_disk:
                saved += 1 - disk_read_share
            else:
                break
        return saved

    def _in_memory(self, key: int) -> bool:
        return key in self._held or key in self._expected
