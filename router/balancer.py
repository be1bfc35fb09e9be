"""Which engine takes a request: the least loaded."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from octavo.v1 import engine_pb2


class Candidate(Protocol):
    """An engine as the balancer sees it."""

    sequences: int
    """Sequences that this router has given it and that have not ended."""
    load: engine_pb2.Load
    """What it reported last."""

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in its running batch."""


C = TypeVar("C", bound=Candidate)


def headroom(max_num_seqs: int) -> int:
    """Returns how many sequences an engine may have waiting, so that it never idles."""
    return max(1, max_num_seqs // 8)


def has_room(candidate: Candidate, sequences: int) -> bool:
    """Says whether an engine may be given `sequences` more; an empty one always may."""
    limit = candidate.max_num_seqs + headroom(candidate.max_num_seqs)
    return candidate.sequences == 0 or candidate.sequences + sequences <= limit


def least_loaded(candidates: Iterable[C], sequences: int) -> C | None:
    """Returns the least loaded engine with room for `sequences`, or None."""
    return min((c for c in candidates if has_room(c, sequences)), key=_load, default=None)


def _load(candidate: Candidate) -> float:
    """Returns the part of an engine's batch that is taken plus the part of its memory.

    Its report covers what other routers gave it; this router's own count covers
    what it gave since the report.
    """
    load = candidate.load
    reported = load.running + load.waiting + load.swapped
    batch = max(candidate.sequences, reported) / max(candidate.max_num_seqs, 1)
    if not load.total_blocks:
        return batch
    return batch + 1 - (load.free_blocks + load.cached_blocks) / load.total_blocks
