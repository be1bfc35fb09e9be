"""Chooses the engines that suit what is left of a request: its prompt, or the tokens behind it."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from octavo.router.admission.claims import Claim, Claims
from octavo.router.balancing.policy import Candidate, taken
from octavo.v1.generation_pb2 import GenerateRequest

MIN_PREFILL_TOKENS = 128
"""Minimum tokens to compute of a prompt that is sent to a prefill engine: a shorter one delays the
other engine's streams by less than sending it takes."""


class Replica(Candidate, Protocol):
    """The interface of an engine for admission."""

    claims: Claims
    """Requests that this router sent to the engine."""

    @property
    def block_layout(self) -> str:
        """Name of its blocks' layout, which engines share to copy them; empty if it copies none."""

    @property
    def prefills(self) -> bool:
        """Whether its role is to compute prompts."""


E = TypeVar("E", bound=Replica)


def successors(engine: Replica, engines: Sequence[E]) -> list[E]:
    """Return the engines that a prefill engine's requests go on at, after their first token."""
    if not engine.prefills or not engine.block_layout:
        return []
    return [e for e in engines if not e.prefills and e.block_layout == engine.block_layout]


def for_stage(engines: Sequence[E], claim: Claim[E]) -> Sequence[E]:
    """Return the engines that suit a request; all if none has the role that it needs.

    A prompt that would wait for others at every prefill engine may go to an idle engine.
    """
    prefill = [engine for engine in engines if successors(engine, engines)]
    if not prefill:
        return engines
    others = [engine for engine in engines if engine not in prefill]
    message = claim.request.message
    is_beam = isinstance(message, GenerateRequest) and message.HasField("beam")
    if claim.state.output_tokens or is_beam:
        return others
    uncached = len(claim.prompt) - max(engine.saved_tokens(claim) for engine in others)
    if uncached < MIN_PREFILL_TOKENS:
        return others
    idle = [engine for engine in others if not taken(engine)]
    return [*prefill, *idle] if all(map(taken, prefill)) else prefill
