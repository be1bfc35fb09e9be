"""Imported before torch, whose OpenMP reads its environment as it is loaded."""

import os

# Turns that a waiting thread spins: some 0.2 ms. The parallel loops of a step are microseconds
# apart; between steps a thread should sleep, so that others find a free core. With libgomp's
# default of 300,000 it would spin from step to step.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
