"""What AdminService has changed in the engines that a router's settings name."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from octavo.router.settings import is_discovered


@dataclass(slots=True)
class EngineChanges:
    """The changes that hold now, by the engines' addresses.

    Attributes:
        added: Engines that the settings do not name.
        drained: Engines that are given no new requests.
        removed: Engines that the settings or a DNS name have.
    """

    added: set[str] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)

    def add(self, address: str) -> None:
        """Note that an engine was added, or that a drained one takes requests again."""
        if address in self.drained:
            self.drained.remove(address)
        else:
            self.removed.discard(address)
            self.added.add(address)

    def drain(self, address: str) -> None:
        """Note that an engine was drained."""
        self.drained.add(address)

    def remove(self, address: str) -> None:
        """Note that an engine was removed."""
        self.added.discard(address)
        self.drained.discard(address)
        self.removed.add(address)

    def known(self, engines: Iterable[str]) -> list[str]:
        """Return the addresses of the engines that need no discovery.

        Args:
            engines: The engines of the settings, DNS names and labels among them.
        """
        named = [each for each in engines if not is_discovered(each)]
        kept = [address for address in named if address not in self.removed]
        return kept + sorted(self.added - set(kept))

    def to_json(self) -> dict[str, list[str]]:
        """Return the changes as JSON has them."""
        return {name: sorted(addresses) for name, addresses in asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the changes that `to_json` returned."""
        return cls(**{name: set(addresses) for name, addresses in data.items()})
