"""Tracing settings, separate from `tracing` so that flags do not import OpenTelemetry."""

from pydantic import Field

from octavo.common.settings import Settings


class TracingSettings(Settings):
    """Settings of tracing."""

    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        description="URL of the OpenTelemetry collector that receives spans over OTLP/gRPC, "
        "such as http://localhost:4317. Default: no tracing.",
    )
