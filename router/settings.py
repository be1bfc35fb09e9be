"""The router's settings."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from octavo.common.connections import ConnectionLimits, ConnectionSettings
from octavo.common.listening import TlsSettings, is_loopback
from octavo.common.tls import Tls
from octavo.common.tracing_settings import TracingSettings
from octavo.router.balancing import PolicyName

DNS_SCHEME = "dns:///"
"""Before a name whose every address is an engine, as in gRPC's own targets."""


def is_address(text: str) -> bool:
    """Return whether a text is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 65536


class RouterSettings(TracingSettings, ConnectionSettings, TlsSettings):
    """The settings of `octavo router`."""

    table: ClassVar[str] = "router"

    engine: list[str] = Field(
        ["127.0.0.1:50052"],
        description="Engine as HOST:PORT, or dns:///NAME:PORT for every address of a name. "
        "May be given several times.",
    )
    engine_ca: Path | None = Field(
        None,
        description="PEM file with the certificate authorities of engines' certificates. "
        "Default: no TLS to engines.",
    )
    engine_cert: Path | None = Field(
        None, description="PEM file with the router's client certificate for engines."
    )
    engine_key: Path | None = Field(None, description="PEM file with its private key.")
    engine_tls_name: str | None = Field(
        None,
        description="Name in engines' certificates. Default: the host in --engine, or the address "
        "that DNS returned.",
    )
    dns_interval: float = Field(
        5.0, gt=0, description="Seconds between DNS lookups of the engines' names."
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    metrics_port: int = Field(
        9151,
        ge=0,
        le=65535,
        description="Port of the Prometheus metrics; 0 turns them off. If the default is taken, "
        "they are at a free port that the log names.",
    )
    admin_host: str = Field("127.0.0.1", description="Address to listen on for AdminService.")
    admin_port: int = Field(0, ge=0, le=65535, description="Port of AdminService; 0 turns it off.")
    tenants: Path | None = Field(
        None,
        description="TOML file of the tenants, with their keys and limits; reloaded when it "
        "changes. Default: no authentication.",
    )
    http_host: str = Field("127.0.0.1", description="Address to listen on for HTTP.")
    http_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of the HTTP server: OpenAI's API and the playground; 0 turns it off.",
    )
    http_cors_origin: list[str] = Field(
        [],
        description="Origin of web pages that may use the HTTP API, such as https://example.com, "
        "or * for any. May be given several times. Default: none.",
    )
    tokenizer: str | None = Field(
        None,
        description="Hub name, directory or 'demo' to load the tokenizer from. Default: the "
        "engine's.",
    )
    balancing: PolicyName = Field(
        "prefix_aware",
        description="Load balancing: prefix_aware is the least work before the first token, less "
        "the cached part of the prompt; least_loaded ignores the cache; round_robin is each engine "
        "in turn.",
    )
    max_queue_size: int = Field(
        1024, ge=0, description="Maximum requests waiting in the router for an engine."
    )
    max_queue_tokens: int = Field(
        1 << 20,
        ge=0,
        description="Maximum tokens of all waiting requests, expected output included.",
    )
    max_queue_time: float = Field(
        600.0, gt=0, description="Maximum seconds a request waits while engines are busy."
    )
    max_message_bytes: int = Field(
        4 << 20, ge=1024, description="Maximum bytes of a client's message."
    )
    max_calls_per_peer: int = Field(
        0,
        ge=0,
        description="Maximum calls in progress per client address; 0 for no limit, as needed "
        "behind a proxy.",
    )
    max_connections_per_peer: int = Field(
        0,
        ge=0,
        description="Maximum HTTP connections per client address; 0 for no limit, as needed "
        "behind a proxy.",
    )
    max_connection_idle: float = Field(
        0.0, ge=0, description="Seconds without a call until a connection is closed; 0 for never."
    )
    max_connection_age: float = Field(
        0.0,
        ge=0,
        description="Maximum age of a connection in seconds, plus or minus 10%, so that load "
        "balancers can spread clients again; 0 for no maximum.",
    )
    max_connection_age_grace: float = Field(
        600.0, ge=0, description="Seconds that calls in progress then have to complete."
    )
    connect_timeout: float = Field(
        5.0, gt=0, description="Seconds that an engine has to answer when the router connects."
    )
    keepalive_time: float = Field(
        5.0, ge=1, description="Seconds of silence after which an engine is pinged."
    )
    keepalive_timeout: float = Field(
        5.0,
        gt=0,
        description="Seconds that a pinged engine has to answer, or it is lost.",
    )
    heartbeat_timeout: float = Field(
        20.0,
        gt=0,
        description="Seconds of an engine's silence after which it counts as hung; engines "
        "send a heartbeat once a second, also while a step runs.",
    )
    max_moves: int = Field(
        5,
        ge=0,
        description="Maximum migrations of a request to other engines; 0 for none.",
    )
    failover_timeout: float = Field(
        30.0,
        ge=0,
        description="Seconds that requests wait while no engine is up; after that, waiting and "
        "new requests are refused.",
    )
    write_timeout: float = Field(
        60.0, gt=0, description="Seconds that a client may leave its stream unread."
    )
    max_unread_tokens: int = Field(
        4096,
        ge=1,
        description="Maximum tokens of an output that wait for a slow client; beyond that the "
        "request is cancelled.",
    )
    drain_timeout: float = Field(
        30.0, ge=0, description="Seconds that running requests have to complete on SIGTERM."
    )

    @property
    def connection_limits(self) -> ConnectionLimits:
        """As `create_server` takes them."""
        return replace(
            super().connection_limits,
            max_idle=self.max_connection_idle,
            max_age=self.max_connection_age,
            age_grace=self.max_connection_age_grace,
        )

    @property
    def engine_tls(self) -> Tls | None:
        """The router's files on its connections to engines; None: plaintext."""
        if self.engine_ca is None:
            return None
        return Tls(self.engine_ca, self.engine_cert, self.engine_key, self.engine_tls_name)

    @model_validator(mode="after")
    def _engine_tls_together(self) -> Self:
        if (self.engine_cert is None) != (self.engine_key is None):
            raise ValueError("--engine-cert and --engine-key go together")
        if self.engine_ca is None and (self.engine_cert or self.engine_tls_name):
            raise ValueError("--engine-cert and --engine-tls-name need --engine-ca")
        return self

    @model_validator(mode="after")
    def _admin_is_guarded(self) -> Self:
        guarded = self.tenants is not None or self.tls_client_ca is not None
        if self.admin_port and not is_loopback(self.admin_host) and not guarded:
            raise ValueError(
                f"AdminService on {self.admin_host} (--admin-host) is unauthenticated; set "
                "--tenants with an admin among them, or --tls-client-ca"
            )
        return self

    @property
    def http_url(self) -> str:
        """URL of the HTTP server, if it is on."""
        host = f"[{self.http_host}]" if ":" in self.http_host else self.http_host
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{host}:{self.http_port}/"

    @field_validator("engine")
    @classmethod
    def _addresses(cls, addresses: list[str]) -> list[str]:
        """Refuse what is neither, and repetitions, which would share one engine twice."""
        if not addresses:
            raise ValueError("needs at least one HOST:PORT")
        for address in addresses:
            if not is_address(address.removeprefix(DNS_SCHEME)):
                raise ValueError(
                    f"{address!r} is neither HOST:PORT, such as 127.0.0.1:50052, nor "
                    f"{DNS_SCHEME}NAME:PORT"
                )
        if len(set(addresses)) != len(addresses):
            raise ValueError("names an engine twice")
        return addresses
