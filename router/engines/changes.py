"""AdminService's changes to the engines of a router's settings."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from octavo.router.settings import is_discovered


@dataclass(slots=True)
class EngineChanges:
    """The current changes, by engine address.

    Attributes:
        added: Engines that are not in the settings.
        drained: Engines that get no new requests.
        removed: Removed engines of the settings or of a name.
    """

    added: set[str] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)

    def add(self, address: str) -> None:
        """Record that an engine was added, or that a drained one accepts requests again."""
        if address in self.drained:
            self.drained.remove(address)
        else:
            self.removed.discard(address)
            self.added.add(address)

    def drain(self, address: str) -> None:
        """Record that an engine was drained."""
        self.drained.add(address)

    def remove(self, address: str) -> None:
        """Record that an engine was removed."""
        self.added.discard(address)
        self.drained.discard(address)
        self.removed.add(address)

    def known(self, engines: Iterable[str]) -> list[str]:
        """Return the engines' addresses, except those that are discovered.

        Args:
            engines: Engines of the settings, including names and labels.
        """
        named = [each for each in engines if not is_discovered(each)]
        kept = [address for address in named if address not in self.removed]
        return kept + sorted(self.added - set(kept))

    def to_json(self) -> dict[str, list[str]]:
        """Return the changes in a form that JSON can encode."""
        return {name: sorted(addresses) for name, addresses in asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the changes that `to_json` encoded."""
        return cls(**{name: set(addresses) for name, addresses in data.items()})
