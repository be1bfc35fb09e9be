"""Limits the calls in progress per client address."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.common.rpc.errors import exhausted

RETRY_SECONDS = 1.0
"""Retry delay of refused calls in seconds, as the end of other calls is unknown."""


class PeerLimit:
    """The calls in progress of each address.

    Args:
        limit: Maximum calls of an address; 0: unlimited.
        noun: What error messages call them.
    """

    def __init__(self, limit: int, noun: str = "calls") -> None:
        self._limit = limit
        self._noun = noun
        self._calls: Counter[str] = Counter()

    @contextmanager
    def counted(self, address: str) -> Iterator[None]:
        """Count a call within a block.

        Raises:
            RpcError: RESOURCE_EXHAUSTED if the address has too many in progress.
        """
        if self._limit and self._calls[address] >= self._limit:
            raise exhausted(
                f"{self._limit} {self._noun} of {address} are in progress, the maximum per address "
                "(--max-calls-per-peer); retry when one has ended",
                RETRY_SECONDS,
            )
        self._calls[address] += 1
        try:
            yield
        finally:
            self._calls[address] -= 1
            if not self._calls[address]:
                del self._calls[address]
