"""`octavo bench`: what load a server bears, seen from a client.

commands: the sub-commands. flags, several_values: their flags. settings: what
those amount to.
workload: the requests. load: sends them. metrics: what the answers amount to.
report: the JSON. tables, plots: for people. session: one call of the command.

Nothing that commands imports needs numpy, so that `octavo` starts fast.
"""

from octavo.cli.bench.commands import bench

__all__ = ["bench"]
