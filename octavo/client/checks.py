"""Errors about values that do not fit the protobuf fields, raised before sending."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from octavo.client.errors import FieldViolation, InvalidArgumentError


@contextmanager
def checked(path: str) -> Iterator[None]:
    """Name the field if protobuf or a conversion rejects a value in the block."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise invalid(path, f"{path}: {error}") from None


def invalid(path: str, message: str) -> InvalidArgumentError:
    """Return the error that the field at `path` is invalid."""
    code = grpc.StatusCode.INVALID_ARGUMENT
    return InvalidArgumentError(code, message, (FieldViolation(path, message),))
