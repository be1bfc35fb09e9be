"""The interface of balancing policies and their input, and the limit that all share."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from octavo.v1 import engine_pb2


class Candidate(Protocol):
    """The interface of an engine for policies."""

    load: engine_pb2.Load
    """The engine's last report."""

    @property
    def sequences(self) -> int:
        """Number of unfinished sequences that this router sent to the engine."""

    @property
    def max_num_seqs(self) -> int:
        """Maximum sequences in the engine's running batch."""

    def cached_tokens(self, request: "RequestNeeds") -> int:
        """Return the number of a prompt's tokens that are assumed to be cached in memory."""

    def saved_tokens(self, request: "RequestNeeds") -> float:
        """Return the number of a prompt's tokens whose computing the engine's prefixes save."""

    def expect(self, request: "RequestNeeds") -> None:
        """Assume that the prompt is cached from now on: the engine is about to compute it."""


class RequestNeeds(Protocol):
    """The interface of a request for policies."""

    @property
    def model(self) -> str:
        """Name of the model."""

    @property
    def sequences(self) -> int:
        """Number of sequences of the request."""

    @property
    def prompt(self) -> Sequence[int]:
        """Its prompt's tokens."""

    def keys(self, block_size: int) -> list[int]:
        """Return the keys, as engines publish them, of the prompt's blocks that can be cached."""


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    """Chooses an engine for each request; may keep state, as the chosen engine gets the request."""

    def __call__(self, candidates: Sequence[C], request: RequestNeeds) -> C | None:
        """Return an engine with room for the request, or None."""


def headroom(max_num_seqs: int) -> int:
    """Return how many sequences may wait at an engine, so that it never idles."""
    return max(1, max_num_seqs // 8)


def has_room(candidate: Candidate, sequences: int) -> bool:
    """Return whether an engine may be sent `sequences` more.

    Always true if it runs none of this router's, or other routers could keep this one out.
    """
    limit = candidate.max_num_seqs + headroom(candidate.max_num_seqs)
    return candidate.sequences == 0 or taken(candidate) + sequences <= limit


def with_room(candidates: Iterable[C], request: RequestNeeds) -> list[C]:
    """Return the engines with room for the request."""
    return [c for c in candidates if has_room(c, request.sequences)]


def batch_share(candidate: Candidate) -> float:
    """Return the used share of an engine's batch; above 1 if requests wait."""
    return taken(candidate) / max(candidate.max_num_seqs, 1)


def taken(candidate: Candidate) -> int:
    """Return the number of sequences that use or wait for an engine's batch.

    The report includes other routers' requests; this router's count includes those since then.
    """
    load = candidate.load
    return max(candidate.sequences, load.running + load.waiting + load.swapped)


def memory_share(candidate: Candidate) -> float:
    """Return the share of an engine's blocks that requests hold."""
    load = candidate.load
    if not load.total_blocks:
        return 0.0
    return 1 - (load.free_blocks + load.cached_blocks) / load.total_blocks


def occupancy(candidate: Candidate) -> float:
    """Return the sum of the used shares of an engine's batch and memory."""
    return batch_share(candidate) + memory_share(candidate)
