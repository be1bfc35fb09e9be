"""Octavo beside the servers and libraries that people would otherwise pick.

`python -m benchmarks.peers` sends the same requests to each on the same machine
in the same run. Each peer is a process in a virtual environment of its own
(`environments`), which speaks JSON lines (`workers.protocol`); rounds are
interleaved (`rounds`), and all peers but the measured one are stopped.
"""
