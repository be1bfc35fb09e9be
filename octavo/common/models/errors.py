"""Errors for models that are not found or cannot be served."""


class ModelError(Exception):
    """A model is not found or cannot be served; the message says what was tried and why."""


class UnsupportedModelError(ModelError):
    """Octavo cannot serve the model at all, or not with these settings."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return f"{error}".strip().partition("\n")[0] or type(error).__name__
