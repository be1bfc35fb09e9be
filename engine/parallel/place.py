"""This process's rank, from the variables of torchrun and other launchers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports what `octavo` without extras lacks
    from octavo.common.topology import Node

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class RankError(Exception):
    """The ranks cannot start or work together; the message says what to change."""


class RankLeftError(RankError):
    """Another rank left before the engine was ready; the message says why, if it did."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank of an engine.

    Attributes:
        rank: Its number; rank 0 has the scheduler and samples.
        size: Number of ranks.
        local_rank: Its number among the ranks of this machine.
        local_size: Number of ranks on this machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a process at this place."""
        numbers = self.rank, self.size, self.local_rank, self.local_size
        return dict(zip(NAMES, map(str, numbers), strict=True))

    def share_of(self, nodes: "Sequence[Node]") -> "tuple[Node, ...]":
        """Return this rank's share of a machine's cores: at least one, perhaps shared."""
        cores = [(node, core) for node in nodes for core in node.cores]
        first, end = (len(cores) * i // self.local_size for i in self._ends)
        own_cores = cores[first : max(end, first + 1)]
        shares = []
        for node in nodes:
            kept = tuple(core for home, core in own_cores if home is node)
            if kept:
                shares.append(replace(node, cores=kept))
        return tuple(shares)

    @property
    def _ends(self) -> tuple[int, int]:
        return self.local_rank, self.local_rank + 1


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines that an engine's ranks are on, each with as many.

    Attributes:
        count: Number of machines.
        number: This machine's number.
        host: Host of machine 0, where ranks find each other; None on one machine.
        port: The port there.
    """

    count: int = 1
    number: int = 0
    host: str | None = None
    port: int = 0

    def places(self, size: int) -> list[RankPlace]:
        """Return the places of this machine's ranks.

        Args:
            size: Number of all ranks.
        """
        here = size // self.count
        first = self.number * here
        return [RankPlace(first + i, size, i, here) for i in range(here)]

    def variables(self) -> dict[str, str]:
        """Return the environment variables by which ranks find each other."""
        if self.host is None:
            return {}
        return {"MASTER_ADDR": self.host, "MASTER_PORT": str(self.port)}


def place_from_launcher(environment: Mapping[str, str], size: int) -> RankPlace | None:
    """Return this process's place from a launcher; None without a launcher.

    Args:
        environment: The environment variables.
        size: Number of ranks that the settings ask for.

    Raises:
        RankError: The variables are wrong or do not fit the setting.
    """
    if "WORLD_SIZE" not in environment or "RANK" not in environment:
        return None
    try:
        rank, world = (int(environment[name]) for name in NAMES[:2])
        local_rank = int(environment.get("LOCAL_RANK", rank))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", 1))
    except ValueError as error:
        raise RankError(f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers: {error}") from error
    if world != size:
        raise RankError(
            f"WORLD_SIZE is {world}, but --tensor-parallel-size times --pipeline-parallel-size is"
            f" {size}: a launcher must start one process for each rank"
        )
    if not 0 <= rank < world:
        raise RankError(f"RANK is {rank}, but WORLD_SIZE is {world}")
    return RankPlace(rank, world, local_rank, local_size)
