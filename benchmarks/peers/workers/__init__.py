"""One file for each peer: how it loads the model and answers a workload.

These run in the peers' environments, where nothing of this project is installed
(but for `octavo.py`), so they import each other alone, and relatively: there the
package is `peers.workers`, because the repository's root also holds packages whose
names a peer may look for, such as `kernels`.
"""
