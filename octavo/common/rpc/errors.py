"""Errors that callers receive, as gRPC statuses with google.rpc details."""

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from octavo.common.failure_details import failure_details

DOMAIN = "octavo"
"""Domain of the reasons in google.rpc.ErrorInfo."""
CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
"""Reason of errors about prompts that exceed the model's context or cache."""

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class RpcError(Exception):
    """A failure with a status that the caller receives.

    Attributes:
        code: The gRPC status.
        message: Text for people: the problem, the allowed values, and what to do.
        field: Path of the invalid field in the request.
        retry_after: Seconds until a retry may succeed.
        reason: Name for programs, to distinguish failures with the same status.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        field: str | None = None,
        retry_after: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.field = field
        self.retry_after = retry_after
        self.reason = reason

    @classmethod
    def from_code(cls, code: int, message: str, field: str | None = None) -> "RpcError":
        """Return the error of a google.rpc.Code number; unknown numbers become INTERNAL."""
        status = _CODES.get(code, grpc.StatusCode.INTERNAL)
        if status is grpc.StatusCode.OK:
            status = grpc.StatusCode.INTERNAL
        return cls(status, message, field=field or None)

    @classmethod
    def from_call(cls, error: grpc.aio.AioRpcError) -> "RpcError":
        """Convert another server's error, with its field and retry delay."""
        violations, retry_after = failure_details(error)
        field = violations[0].field if violations else None
        return cls(error.code(), error.details() or "", field=field, retry_after=retry_after)

    def to_status(self) -> status_pb2.Status:
        """Return the error as google.rpc.Status with its details."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        if self.field is not None:
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=self.field, description=self.message
            )
            status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.retry_after is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromNanoseconds(int(self.retry_after * 1e9))
            status.details.add().Pack(retry)
        if self.reason is not None:
            reason = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN)
            status.details.add().Pack(reason)
        return status


def invalid(field: str, message: str, *, reason: str | None = None) -> RpcError:
    """Return INVALID_ARGUMENT: `field` is invalid, regardless of the service's state."""
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, message, field=field, reason=reason)


def not_found(field: str, message: str) -> RpcError:
    """Return NOT_FOUND: the object named in `field` does not exist."""
    return RpcError(grpc.StatusCode.NOT_FOUND, message, field=field)


def precondition(field: str, message: str) -> RpcError:
    """Return FAILED_PRECONDITION: the service is not configured for `field`."""
    return RpcError(grpc.StatusCode.FAILED_PRECONDITION, message, field=field)


def unimplemented(field: str, message: str) -> RpcError:
    """Return UNIMPLEMENTED: the service does not support `field`."""
    return RpcError(grpc.StatusCode.UNIMPLEMENTED, message, field=field)


def denied(message: str, field: str | None = None) -> RpcError:
    """Return PERMISSION_DENIED: the caller is known, but may not do this."""
    return RpcError(grpc.StatusCode.PERMISSION_DENIED, message, field=field)


def unavailable(message: str, retry_after: float | None = None) -> RpcError:
    """Return UNAVAILABLE: nothing can serve the call now; a retry may succeed."""
    return RpcError(grpc.StatusCode.UNAVAILABLE, message, retry_after=retry_after)


def exhausted(message: str, retry_after: float) -> RpcError:
    """Return RESOURCE_EXHAUSTED: a limit is reached; retry after `retry_after` seconds."""
    return RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, retry_after=retry_after)
