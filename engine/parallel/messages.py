"""Rank 0's messages: one broadcast each, unless a message is longer than the last ones.

A broadcast has one size on all ranks, and the receivers cannot know a message's length. So it has
the size of the longest of the last messages, which all ranks know. The rest of a longer message
follows in a second broadcast.
"""

from collections import deque

import numpy as np

HEAD_BYTES = 16
"""Bytes before a message: its length, padded so that arrays in it stay aligned."""
STRIDE = 4096
"""Divisor of a broadcast's bytes: messages of growing sequences rarely need a second broadcast."""
REMEMBERED = 8
"""Number of messages whose lengths determine the size of the next broadcast."""


class MessageRoom:
    """The size of the next message's first broadcast, equal on all ranks."""

    def __init__(self) -> None:
        self._last = deque([STRIDE], REMEMBERED)

    @property
    def size(self) -> int:
        """Bytes of the next first broadcast."""
        return max(self._last)

    def split(self, message: np.ndarray) -> list[np.ndarray]:
        """Return the broadcasts of a message, one or two.

        Args:
            message: `[n]` uint8.
        """
        whole = np.empty(max(self.size, HEAD_BYTES + len(message)), np.uint8)
        whole[:HEAD_BYTES].view(np.int64)[:] = len(message)
        whole[HEAD_BYTES : HEAD_BYTES + len(message)] = message
        parts = [part for part in np.split(whole, [self.size]) if len(part)]
        self._remember(len(message))
        return parts

    def rest_of(self, first: np.ndarray) -> int:
        """Return the bytes that follow a first broadcast, and remember its message.

        Args:
            first: `[size]` uint8.
        """
        length = int(first[:HEAD_BYTES].view(np.int64)[0])
        rest = max(0, HEAD_BYTES + length - self.size)
        self._remember(length)
        return rest

    def _remember(self, length: int) -> None:
        self._last.append(-(-(HEAD_BYTES + length) // STRIDE) * STRIDE)


def join_broadcasts(first: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Return the message, `[n]` uint8, that two broadcasts carry; the second may be empty."""
    length = int(first[:HEAD_BYTES].view(np.int64)[0])
    message = first[HEAD_BYTES : HEAD_BYTES + length]
    return np.concatenate([message, rest]) if len(rest) else message
