"""One log for structlog's events and stdlib records."""

import logging
import os
import sys
from typing import Any, Literal

import structlog
from structlog.typing import Processor

LogFormat = Literal["console", "json"]

QUIET = (
    "asyncio",
    "filelock",
    "httpcore",
    "httpx",
    "huggingface_hub",
    "torch",
    "urllib3",
    "uvicorn",
)
"""Libraries of which only warnings and errors are logged."""


def configure(
    log_format: LogFormat = "console",
    log_level: str = "info",
    **fields: Any,  # noqa: ANN401 - any value in a log line
) -> None:
    """Send all logs to stderr; call it once per process, before anything logs.

    Args:
        log_format: Format of the lines.
        log_level: Lowest level to log.
        **fields: Fields for every line, such as the process's number.

    Timestamps are UTC. Every line contains the bound `structlog.contextvars`, such as request ids.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        lambda _logger, _method, event: {**fields, **event},
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(log_format),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())
    _quieten()


def _renderers(log_format: LogFormat) -> list[Processor]:
    """Return the processors that render an event as a line."""
    if log_format == "console":
        plain = structlog.dev.plain_traceback
        colors = sys.stderr.isatty()
        return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    # Tracebacks omit local variables, which may contain prompts.
    frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(frames), structlog.processors.JSONRenderer()]


def _is_no_departure(record: logging.LogRecord) -> bool:
    """Return False for gRPC's traceback about a client that disconnected at a bad moment."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


def _quieten() -> None:
    """Silence libraries' informational logs, also of later imports."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_departure)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
