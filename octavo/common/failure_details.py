"""Reads the google.rpc details of a failed call, for clients and servers."""

from typing import Any, cast

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status


def failure_details(error: grpc.RpcError) -> tuple[list[Any], float | None]:
    """Return a failed call's field violations and its retry delay in seconds, if any."""
    violations: list[Any] = []
    retry_after = None
    try:
        status = rpc_status.from_call(cast("grpc.Call", error))
    except ValueError:  # the details contradict the call's status
        status = None
    for detail in [] if status is None else status.details:
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad):
            violations += bad.field_violations
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToTimedelta().total_seconds()
    return violations, retry_after
