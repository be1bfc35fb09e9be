"""The error of an adapter that cannot be served."""


class AdapterError(Exception):
    """An adapter cannot be read or does not fit the model; the message says why."""
