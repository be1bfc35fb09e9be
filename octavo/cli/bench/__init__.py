"""`octavo bench`: measure a server's throughput and latency from a client.

`commands` imports no numpy, so that `octavo` starts fast.
"""

from octavo.cli.bench.commands import bench

__all__ = ["bench"]
