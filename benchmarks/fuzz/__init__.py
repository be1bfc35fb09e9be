"""Fuzz real processes with bad requests: `python -m benchmarks.fuzz`."""
