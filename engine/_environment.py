"""Sets OpenMP's environment; import it before torch, whose OpenMP reads it when loaded."""

import os

# Spins of a waiting thread: about 0.2 ms. The parallel loops of a step are microseconds apart, but
# between steps a thread should sleep, so that others find a free core. With libgomp's default of
# 300,000 it would spin from step to step.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
