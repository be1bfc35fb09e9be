"""gRPC failures as typed exceptions."""

from dataclasses import dataclass

import grpc

from octavo.client.types import Completion
from octavo.common.failure_details import failure_details


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """An invalid field of the request, with the reason."""

    field: str
    description: str


class Error(Exception):
    """A request failed.

    Attributes:
        code: The gRPC status.
        message: The server's message.
        violations: Invalid fields of the request, if known.
        retry_after: Seconds to wait before a retry, if known.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: tuple[FieldViolation, ...] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.violations = violations
        self.retry_after = retry_after


class InvalidArgumentError(Error):
    """The request is invalid; `violations` lists the fields."""


class NotFoundError(Error):
    """No such model."""


class ResourceExhaustedError(Error):
    """A queue, quota or memory is full; retry after `retry_after` seconds."""


class UnavailableError(Error):
    """The server or an engine is unavailable; a retry may help."""


class DeadlineExceededError(Error):
    """The call timed out."""


class CancelledError(Error):
    """The call was cancelled."""


class OutputError(Error):
    """An output does not match the requested type: truncated, or rejected by a validator.

    Attributes:
        completion: The model's answer.
    """

    def __init__(self, message: str, completion: Completion) -> None:
        super().__init__(grpc.StatusCode.OUT_OF_RANGE, message)
        self.completion = completion


class UnauthenticatedError(Error):
    """The credentials are missing or invalid."""


class PermissionDeniedError(Error):
    """The credentials do not allow this call."""


class InternalError(Error):
    """The server failed unexpectedly."""


_CLASSES: dict[grpc.StatusCode, type[Error]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.INTERNAL: InternalError,
}


def from_rpc_error(error: grpc.RpcError) -> Error:
    """Convert a grpc error, sync or asyncio, to an `Error` with details."""
    code, message = error.code(), error.details() or ""
    violations, retry_after = failure_details(error)
    fields = tuple(FieldViolation(each.field, each.description) for each in violations)
    return _CLASSES.get(code, Error)(code, message, fields, retry_after)
