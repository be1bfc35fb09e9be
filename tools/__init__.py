"""Generators of documents and dashboards. Not part of the wheel."""
