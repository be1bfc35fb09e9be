"""Runs a module in a process that ends with its starter.

    python -m octavo.common.parent_watch MODULE ARGUMENT...

The starter makes this process a session leader, and keeps the other end of its standard input. When
the starter ends, the kernel closes that pipe, and this kills all processes of the session.
"""

import os
import runpy
import signal
import sys

from octavo.common.background import keep_thread_running


def main() -> None:
    """Run the module that the arguments name."""
    keep_thread_running(_end_with_starter, "parent-watch")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _end_with_starter() -> None:
    """Wait for the end of standard input, then kill the session's processes."""
    os.read(sys.stdin.fileno(), 1)  # unbuffered: a buffer's lock would be held at exit
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
