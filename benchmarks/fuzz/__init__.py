"""Rude clients against real processes: `python -m benchmarks.fuzz`."""
