"""A router with several worker processes: what they share, and what shows them as one router."""
