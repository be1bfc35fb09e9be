"""Exempt all imported objects from garbage collection; import this last before forking.

A forked server collects garbage before it serves. It would scan half a million objects of its
parent, and so copy their memory.
"""

import gc

gc.collect()
gc.freeze()
