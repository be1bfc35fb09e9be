"""Octavo: a gRPC service for large language models, built on PagedAttention.

This package is the Python client, and `LLM` for programs without a server; `octavo.router` and
`octavo.engine` are the servers.
"""

from typing import TYPE_CHECKING

from octavo import _environment as _environment
from octavo import client as _client
from octavo.client import *  # noqa: F403

if TYPE_CHECKING:
    from octavo.offline.llm import LLM

__all__ = ["LLM"]
__all__ += _client.__all__


def __getattr__(name: str) -> object:
    """Import `LLM` when it is first used: most clients do without."""
    if name == "LLM":
        from octavo.offline.llm import LLM  # noqa: PLC0415

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
