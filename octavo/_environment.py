"""Imported before grpc, which reads its environment as it is loaded."""

import os
import signal
import sys
from pathlib import Path

# Otherwise gRPC's C core writes lines to stderr when a server goes away, a port is taken or a TLS
# handshake fails. Octavo reports these itself.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _is_command() -> bool:
    """Return whether this process is the `octavo` command, not a program that imports octavo."""
    return Path(sys.argv[0]).name == "octavo" or sys.orig_argv[1:3] == ["-m", "octavo"]


# Ctrl-C during a command's imports ends it without a traceback; `octavo.cli.main` undoes this.
if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
