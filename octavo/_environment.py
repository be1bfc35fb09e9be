"""Imported before grpc, which reads its environment as it is loaded."""

import os

# Without this grpc writes a line to stderr whenever a server goes away.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
