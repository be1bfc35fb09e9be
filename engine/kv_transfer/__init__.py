"""Copies of blocks between engines."""
