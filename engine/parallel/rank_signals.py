"""Notices SIGTERM and SIGINT on a rank that waits in a collective.

Python runs signal handlers only between its own instructions, and such a rank runs none until rank
0 sends a message. So this reads the signals from a socket, to which the interpreter writes at once.
"""

import signal
import socket


class RankSignals:
    """The stop signals of this process; from now on they have no other effect.

    Create it in the main thread.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self._came = False

    def came(self) -> bool:
        """Return whether a signal has arrived."""
        try:
            self._came = self._came or bool(self._reader.recv(1))
        except BlockingIOError:
            return False
        return self._came
