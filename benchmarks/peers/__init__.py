"""Octavo compared with alternative servers and libraries.

`python -m benchmarks.peers` sends the same requests to each on the same machine in the same run.
Each peer is a process in its own virtual environment (`environments`) and speaks JSON lines
(`workers.protocol`). Rounds are interleaved (`rounds`), and all peers but the measured one are
stopped.
"""
