"""Errors of models that cannot be found or served."""


class ModelError(Exception):
    """A model cannot be had, or not be served. The message says what was looked for and why."""


def first_line(error: Exception) -> str:
    """What an error says, short enough for a line of one's own."""
    return f"{error}".strip().partition("\n")[0] or type(error).__name__
