"""One file for each peer: how it loads the model and answers a workload.

These run in the peers' environments, where this project is not installed (except for `octavo.py`),
so they import only each other, and relatively. The package is `peers.workers` there, because the
repository's root also holds packages whose names a peer may look for, such as `kernels`.
"""
