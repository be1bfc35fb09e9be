"""Checks that a model must pass before it serves."""
