"""Errors after which a request may migrate to another engine."""

import grpc

from octavo.common import rpc


class EngineLostError(rpc.RpcError):
    """UNAVAILABLE: the engine is lost or drains; the request can migrate to another."""

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        super().__init__(code, message)


class EngineFaultError(EngineLostError):
    """INTERNAL: a step failed on the engine; the request can migrate to another once.

    Only once: a request that fails on every engine must not stop all of them.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, grpc.StatusCode.INTERNAL)
