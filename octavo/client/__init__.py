"""The Python client, synchronous and asyncio."""

from octavo.client.aio import AsyncClient, AsyncStream
from octavo.client.errors import (
    CancelledError,
    DeadlineExceededError,
    Error,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutputError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from octavo.client.prompts import Prompt
from octavo.client.sync import Client, Stream
from octavo.client.types import (
    Accepted,
    Completion,
    Delta,
    Embeddings,
    Event,
    Finished,
    FinishReason,
    Message,
    Model,
    Output,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from octavo.common.sampling_parameters import GenerateOptions
from octavo.common.tls import Tls, TlsError
from octavo.common.tools import Schema, Tool

__all__ = [
    "Accepted",
    "AsyncClient",
    "AsyncStream",
    "CancelledError",
    "Client",
    "Completion",
    "DeadlineExceededError",
    "Delta",
    "Embeddings",
    "Error",
    "Event",
    "FieldViolation",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "InternalError",
    "InvalidArgumentError",
    "Message",
    "Model",
    "NotFoundError",
    "Output",
    "OutputError",
    "PermissionDeniedError",
    "Prompt",
    "ResourceExhaustedError",
    "Schema",
    "Stream",
    "Tls",
    "TlsError",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
]
