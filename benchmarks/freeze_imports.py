"""Keep Python's garbage collector off all that is imported; for the last import before forks.

A server that is forked collects garbage before it serves: it would look at half a million objects
of its parent's, and so have a copy of the memory that they are in.
"""

import gc

gc.collect()
gc.freeze()
