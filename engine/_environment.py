"""Imported before torch, whose OpenMP reads its environment as it is loaded."""

import os

# Turns, some 0.2 ms, that a computing thread waits awake. The parallel loops of a step are
# microseconds apart; between steps it should sleep, so that others find a core that is free.
# libgomp's own 300,000 last from step to step.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
