"""Errors of models that cannot be found or served."""


class ModelError(Exception):
    """A model cannot be found or served. The message says what was looked for and why."""


class UnsupportedModelError(ModelError):
    """Octavo cannot serve the model, or not with these settings."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return f"{error}".strip().partition("\n")[0] or type(error).__name__
