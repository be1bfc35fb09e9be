"""Checks of a model before it serves requests."""
