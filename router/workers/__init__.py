"""A router with several worker processes, which operators and clients see as one router."""
