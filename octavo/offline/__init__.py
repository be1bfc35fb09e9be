"""Models for programs without a server of their own: scripts, notebooks, evaluations."""
