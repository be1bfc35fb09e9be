"""Limits on a server's connections: number, streams, metadata, pings, age."""

from dataclasses import dataclass

from pydantic import Field

from octavo.common.settings import Settings

HANDSHAKE_SECONDS = 20.0
"""Timeout of a connection's handshake, including TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one server, enforced by gRPC before any handler runs.

    Attributes:
        max_connections: Open connections of all peers; gRPC closes new ones beyond it at once.
        max_streams: Calls in progress per connection; peers queue further ones.
        max_metadata_bytes: Maximum bytes of a call's headers, else RESOURCE_EXHAUSTED.
        min_ping_interval: Minimum seconds between a peer's pings, else ENHANCE_YOUR_CALM.
        max_idle: Seconds without a call until a connection is closed; 0 disables.
        max_age: Seconds until a connection accepts no more calls; 0 disables.
        age_grace: Seconds that calls may take after that.
    """

    max_connections: int = 4096
    max_streams: int = 1024
    max_metadata_bytes: int = 16 << 10
    min_ping_interval: float = 1.0
    max_idle: float = 0.0
    max_age: float = 0.0
    age_grace: float = 0.0

    def options(self) -> list[tuple[str, int]]:
        """Return the channel arguments."""
        options = [
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_streams),
            # If the two limits differ, gRPC rejects sizes between them at random.
            ("grpc.max_metadata_size", self.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.max_metadata_bytes),
            ("grpc.http2.min_ping_interval_without_data_ms", _ms(self.min_ping_interval)),
            ("grpc.server_handshake_timeout_ms", _ms(HANDSHAKE_SECONDS)),
        ]
        if self.max_idle:
            options.append(("grpc.max_connection_idle_ms", _ms(self.max_idle)))
        if self.max_age:
            options.append(("grpc.max_connection_age_ms", _ms(self.max_age)))
            options.append(("grpc.max_connection_age_grace_ms", _ms(self.age_grace)))
        return options


DEFAULT_LIMITS = ConnectionLimits()


class ConnectionSettings(Settings):
    """Connection settings of the router and the engine."""

    max_connections: int = Field(
        DEFAULT_LIMITS.max_connections,
        ge=1,
        description="Maximum connections of all peers; more are closed at once.",
    )
    max_streams: int = Field(
        DEFAULT_LIMITS.max_streams,
        ge=1,
        description="Maximum calls in progress per connection; the peer queues more.",
    )
    max_metadata_bytes: int = Field(
        DEFAULT_LIMITS.max_metadata_bytes,
        ge=1024,
        description="Maximum bytes of a call's metadata; a call with more is refused.",
    )
    min_ping_interval: float = Field(
        DEFAULT_LIMITS.min_ping_interval,
        ge=0,
        description="Minimum seconds between a peer's pings; a faster peer is disconnected.",
    )

    @property
    def connection_limits(self) -> ConnectionLimits:
        """The limits for `create_server`."""
        return ConnectionLimits(
            max_connections=self.max_connections,
            max_streams=self.max_streams,
            max_metadata_bytes=self.max_metadata_bytes,
            min_ping_interval=self.min_ping_interval,
        )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
