"""Errors after which a request may migrate to another engine."""

import grpc

from octavo.common import rpc


class EngineLostError(rpc.RpcError):
    """UNAVAILABLE: the engine is gone or drains; the request can migrate to another."""

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        super().__init__(code, message)


class EngineFaultError(EngineLostError):
    """INTERNAL: a step failed on the engine; the request can migrate to another once.

    Not more often: a request that fails on every engine is itself at fault, and must not stop
    all engines.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, grpc.StatusCode.INTERNAL)
