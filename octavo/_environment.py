"""Sets environment variables of grpc, which reads them on import."""

import os
import signal
import sys
from pathlib import Path

# Silence gRPC's C core: it writes to stderr when a server disappears, a port is in use or a TLS
# handshake fails. Octavo reports these errors itself.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _is_command() -> bool:
    """Return whether this process is the `octavo` command, not a program that imports octavo."""
    return Path(sys.argv[0]).name == "octavo" or sys.orig_argv[1:3] == ["-m", "octavo"]


# Ctrl-C during the command's imports ends it without a traceback; `octavo.cli.main` restores the
# handler.
if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
