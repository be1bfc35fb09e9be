"""Sequences, batches, and the rules that choose each step's batch."""
