"""Octavo: a gRPC service for large language models, built on PagedAttention.

This package is the Python client; `octavo.router` and `octavo.engine` are the servers.
"""

from octavo import _environment as _environment
from octavo import client as _client
from octavo.client import *  # noqa: F403

__all__: list[str] = []
__all__ += _client.__all__
