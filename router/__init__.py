"""The router: what clients talk to; it owns text, admission and balancing."""
