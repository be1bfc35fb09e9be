"""The interface of balancing policies, what they see, and the rule that all share."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from octavo.v1 import engine_pb2


class Candidate(Protocol):
    """An engine as policies see it."""

    load: engine_pb2.Load
    """The last reported load."""

    @property
    def sequences(self) -> int:
        """Sequences that this router has given it and that have not ended."""

    @property
    def max_num_seqs(self) -> int:
        """Maximum sequences in its running batch."""

    def cached_tokens(self, request: "RequestNeeds") -> int:
        """Return how many of a prompt's tokens its cache is assumed to have."""

    def expect(self, request: "RequestNeeds") -> None:
        """Assume from now on that its cache has the prompt: it is about to compute it."""


class RequestNeeds(Protocol):
    """A request as policies see it."""

    @property
    def model(self) -> str:
        """The model whose engines are the candidates."""

    @property
    def sequences(self) -> int:
        """Number of sequences that it needs."""

    @property
    def prompt(self) -> Sequence[int]:
        """Its prompt's tokens."""

    def keys(self, block_size: int) -> list[int]:
        """Return the keys, as engines publish them, of the blocks that a cache can have of it."""


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    """Chooses an engine for each request. It may keep state: its choice gets the request."""

    def __call__(self, candidates: Sequence[C], request: RequestNeeds) -> C | None:
        """Return an engine with room for the request, or None if none has any."""


def headroom(max_num_seqs: int) -> int:
    """Return how many sequences an engine may have waiting, so that it never idles."""
    return max(1, max_num_seqs // 8)


def has_room(candidate: Candidate, sequences: int) -> bool:
    """Return whether an engine may be given `sequences` more.

    One that has none of this router always may, or other routers could keep this one out.
    """
    limit = candidate.max_num_seqs + headroom(candidate.max_num_seqs)
    return candidate.sequences == 0 or _taken(candidate) + sequences <= limit


def with_room(candidates: Iterable[C], request: RequestNeeds) -> list[C]:
    """Return the engines that may be given the request."""
    return [c for c in candidates if has_room(c, request.sequences)]


def batch_share(candidate: Candidate) -> float:
    """Return the part of an engine's batch that is taken; over 1 where requests wait."""
    return _taken(candidate) / max(candidate.max_num_seqs, 1)


def _taken(candidate: Candidate) -> int:
    """Return how many places of an engine's batch are taken, and how many requests wait for one.

    Its report covers what other routers gave it; this router's own count covers
    what it gave since the report.
    """
    load = candidate.load
    return max(candidate.sequences, load.running + load.waiting + load.swapped)


def memory_share(candidate: Candidate) -> float:
    """Return the part of an engine's blocks that requests hold."""
    load = candidate.load
    if not load.total_blocks:
        return 0.0
    return 1 - (load.free_blocks + load.cached_blocks) / load.total_blocks


def occupancy(candidate: Candidate) -> float:
    """Return the sum of the shares that are taken of an engine's batch and of its memory."""
    return batch_share(candidate) + memory_share(candidate)
