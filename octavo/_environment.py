"""Imported before grpc, which reads its environment as it is loaded."""

import os

# Otherwise gRPC's C core writes lines to stderr when a server goes away, a port is taken or a TLS
# handshake fails. Octavo reports these itself.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
