"""The router's settings."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from octavo.common.connections import ConnectionLimits, ConnectionSettings
from octavo.common.listening import TlsSettings
from octavo.common.ports import NO_PORT, Listener, metrics_listener
from octavo.common.proxies import is_loopback
from octavo.common.settings import flag
from octavo.common.tls import Tls
from octavo.common.tracing_settings import TracingSettings
from octavo.router.balancing import PolicyName
from octavo.router.images.url_pattern import UrlPattern
from octavo.router.requests.parser_names import ReasoningParserName, ToolParserName

DNS_SCHEME = "dns:///"
"""Scheme of a DNS name whose addresses are all engines, as in gRPC targets."""
KUBERNETES_SCHEME = "kubernetes:///"
"""Scheme of Pods that are all engines: their labels, joined by `&`, and port."""
RAY_SCHEME = "ray://"
"""Scheme of the --ray-name of engines on a Ray cluster."""
RAY_NAME = r"[\w.-]+"
LABELS = r"[\w./-]+=[\w.-]*(&[\w./-]+=[\w.-]*)*"


def is_address(text: str) -> bool:
    """Return whether a text has the form HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 65536


def is_discovered(target: str) -> bool:
    """Return whether a target's engines are discovered and may change."""
    return target.startswith((DNS_SCHEME, KUBERNETES_SCHEME, RAY_SCHEME))


def is_engine(text: str) -> bool:
    """Return whether a text is a value of --engine."""
    if text.startswith(RAY_SCHEME):
        return re.fullmatch(RAY_NAME, text.removeprefix(RAY_SCHEME)) is not None
    if text.startswith(KUBERNETES_SCHEME):
        labels, _, port = text.removeprefix(KUBERNETES_SCHEME).rpartition(":")
        return re.fullmatch(LABELS, labels) is not None and is_address(f"pods:{port}")
    return is_address(text.removeprefix(DNS_SCHEME))


def http_listener(host: str, port: int) -> Listener:
    """Return the HTTP server's listener."""
    return Listener(host, port, "--http-port", "serve HTTP", NO_PORT)


class RouterSettings(TracingSettings, ConnectionSettings, TlsSettings):
    """The settings of `octavo router`."""

    table: ClassVar[str] = "router"
    former_names: ClassVar[dict[str, str]] = {
        "max_moves": "max_migrations",
        "failover_timeout": "migration_timeout",
    }

    engine: list[str] = Field(
        ["127.0.0.1:50052"],
        description="Engine as HOST:PORT, dns:///NAME:PORT for every address of a name, "
        "kubernetes:///LABEL=VALUE&LABEL=VALUE:PORT for every ready Pod with these labels in the "
        "router's namespace, or ray://NAME for the engines of `octavo serve --ray` with this "
        "--ray-name. May be given several times.",
    )
    engine_ca: Path | None = Field(
        None,
        description="PEM file of the certificate authorities that sign the engines' certificates. "
        "Default: no TLS to engines.",
    )
    engine_cert: Path | None = Field(
        None,
        description="PEM file of the router's client certificate for engines. Default: none.",
    )
    engine_key: Path | None = Field(
        None, description="PEM file of the private key of --engine-cert, not encrypted."
    )
    engine_tls_name: str | None = Field(
        None,
        description="Name expected in the engines' certificates. Default: the host in --engine, or "
        "the address that DNS returned.",
    )
    dns_interval: float = Field(
        5.0,
        gt=0,
        description="Seconds between lookups of dns:/// and ray:// engine names, and before a "
        "watch of kubernetes:/// Pods that failed begins again.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    uds: Path | None = Field(
        None,
        description="Unix socket to serve gRPC on instead of a port, without TLS; the permissions"
        " of its directory protect it. Default: none.",
    )
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Worker processes that share the ports, for example one per core. The router's "
        "limits are divided among them; limits per client address or tenant need 1.",
    )
    metrics_port: int = Field(
        9151,
        ge=0,
        le=65535,
        description="Port for Prometheus metrics; 0 disables them. If the default port is taken, "
        "the router picks a free one and logs it.",
    )
    admin_host: str = Field("127.0.0.1", description="Address to listen on for AdminService.")
    admin_port: int = Field(0, ge=0, le=65535, description="Port of AdminService; 0 disables it.")
    api_key: SecretStr | None = Field(
        None,
        description="API key that all callers must send. Other users see flags in the process "
        "list; prefer the variable. Default: none, or the keys of --tenants.",
    )
    tenants: Path | None = Field(
        None,
        description="TOML file of tenants, their keys and their limits; reloaded when it "
        "changes. Default: no authentication.",
    )
    http_host: str = Field(
        "127.0.0.1", description="Address to listen on for HTTP; :: accepts IPv4 and IPv6."
    )
    http_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of the HTTP server: OpenAI's and Anthropic's APIs and the playground; 0 "
        "disables it.",
    )
    ollama: bool = Field(
        False,
        description="Serve Ollama's API over HTTP too; its clients look for port 11434.",
    )
    http_uds: Path | None = Field(
        None,
        description="Unix socket to serve HTTP on instead of a port: its user and group may"
        " connect. Default: none.",
    )
    http_root_path: str = Field(
        "",
        pattern=r"^((/[\w~-][\w.~-]*)+)?$",
        description="Prefix of HTTP paths, such as /llm behind a proxy that keeps it; paths "
        "without it work too. Default: none.",
    )
    http_cors_origin: list[str] = Field(
        [],
        description="Origin of web pages allowed to use the HTTP API, such as https://example.com, "
        "or * for any. May be given several times. Default: none.",
    )
    http_ping_interval: float = Field(
        5.0,
        gt=0,
        description="Seconds without data after which an HTTP stream sends its headers, and then "
        "comments, so that proxies keep it open.",
    )
    response_store: Path | None = Field(
        None,
        description="SQLite file of the responses that /v1/responses stores, so that they outlast "
        "the router. Default: memory.",
    )
    response_store_space: float = Field(
        0.25,
        gt=0,
        description="Maximum GiB of stored responses and their inputs; the oldest are dropped.",
    )
    batch_dir: Path | None = Field(
        None,
        description="Directory for the files and batches of /v1/files and /v1/batches. Default: "
        "they are off.",
    )
    batch_space: float = Field(10.0, gt=0, description="Maximum GiB of files in --batch-dir.")
    batch_in_flight: int = Field(
        64, ge=1, description="Maximum requests in progress of each batch of /v1/batches."
    )
    tokenizer: str | None = Field(
        None,
        description="Hub name, directory or `demo` to load the tokenizer from. Default: the "
        "engine's model.",
    )
    chat_template: Path | None = Field(
        None,
        description="Jinja file with a chat template for all models. Default: each model's own.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="Variables of the chat template, as a JSON object, for requests that do not "
        "set them themselves in `chat_template_kwargs`.",
    )
    tool_parser: ToolParserName = Field(
        "auto",
        description="Format of the models' tool calls; auto: by the chat template, none: requests "
        "with tools are refused.",
    )
    reasoning_parser: ReasoningParserName = Field(
        "auto",
        description="Format of the models' reasoning; auto: by the chat template and the "
        "vocabulary, none: reasoning is part of the text.",
    )
    allow_special_tokens: bool = Field(
        False,
        description="Let chat texts spell control tokens, such as the end of a turn. Default: only "
        "the chat template writes them; in texts, they stay text.",
    )
    balancing: PolicyName = Field(
        "prefix_aware",
        description="Load balancing policy. prefix_aware: the engine with the least work before "
        "the first token, excluding cached prompt tokens; least_loaded: the same, ignoring the "
        "prefix cache; round_robin: each engine in turn.",
    )
    max_queue_size: int = Field(1024, ge=0, description="Maximum requests in the router's queue.")
    max_queue_tokens: int = Field(
        1 << 20,
        ge=0,
        description="Maximum tokens of all queued requests, prompt and expected output.",
    )
    max_queue_time: float = Field(
        600.0, gt=0, description="Maximum seconds in the queue while engines are busy."
    )
    max_message_bytes: int = Field(
        4 << 20, ge=1024, description="Maximum size of a message from a client, in bytes."
    )
    allow_image_urls: list[str] = Field(
        [],
        description="https URLs that images of requests are fetched from, such as"
        " `https://*.example.com/*`. May be given several times. Only hosts with public addresses"
        " are asked. Default: none; images come as data.",
    )
    max_calls_per_peer: int = Field(
        0,
        ge=0,
        description="Maximum calls in progress per client address; 0 disables the limit, as "
        "needed behind a proxy.",
    )
    max_connections_per_peer: int = Field(
        0,
        ge=0,
        description="Maximum HTTP connections per client address; 0 disables the limit, as "
        "needed behind a proxy.",
    )
    max_connection_idle: float = Field(
        0.0,
        ge=0,
        description="Seconds without a call after which a connection is closed; 0: never.",
    )
    max_connection_age: float = Field(
        0.0,
        ge=0,
        description="Maximum age of a connection in seconds, plus or minus 10%, so that a load "
        "balancer can spread clients again; 0 disables the limit.",
    )
    max_connection_age_grace: float = Field(
        600.0,
        ge=0,
        description="Seconds for calls to finish after their connection's maximum age.",
    )
    connect_timeout: float = Field(
        5.0, gt=0, description="Maximum seconds to connect to an engine."
    )
    keepalive_time: float = Field(
        5.0, ge=1, description="Seconds without data after which the router pings an engine."
    )
    keepalive_timeout: float = Field(
        5.0,
        gt=0,
        description="Maximum seconds for an engine to answer a ping before it counts as lost.",
    )
    heartbeat_timeout: float = Field(
        20.0,
        gt=0,
        description="Seconds without a heartbeat after which an engine counts as hung; engines "
        "send one per second, also during a step.",
    )
    max_migrations: int = Field(
        5,
        ge=0,
        description="Maximum migrations per request to another engine; 0 disables migration.",
    )
    migration_timeout: float = Field(
        30.0,
        ge=0,
        description="Seconds without any engine after which waiting and new requests are refused.",
    )
    write_timeout: float = Field(
        60.0, gt=0, description="Maximum seconds without the client reading its stream."
    )
    max_unread_tokens: int = Field(
        4096,
        ge=1,
        description="Maximum unread tokens per output; a slower client's request is cancelled.",
    )
    drain_delay: float = Field(
        0.0,
        ge=0,
        description="Seconds after SIGTERM in which new requests are still served while health "
        "checks fail, so that load balancers notice before requests are refused.",
    )
    drain_timeout: float = Field(
        30.0,
        ge=0,
        description="Seconds after SIGTERM and --drain-delay for running requests to finish, and "
        "for clients to read the responses.",
    )

    @property
    def drain_seconds(self) -> float:
        """Maximum seconds from SIGTERM until everything has stopped."""
        return self.drain_delay + self.drain_timeout

    @property
    def shares_ports(self) -> bool:
        """Whether several workers share the ports: this process is one, or their parent."""
        return self.workers > 1

    @property
    def connection_limits(self) -> ConnectionLimits:
        """The limits for `create_server`."""
        return replace(
            super().connection_limits,
            max_idle=self.max_connection_idle,
            max_age=self.max_connection_age,
            age_grace=self.max_connection_age_grace,
        )

    @property
    def engine_tls(self) -> Tls | None:
        """TLS files of the connections to engines; None: plaintext."""
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
    def _sockets_or_ports(self) -> Self:
        if self.http_uds is not None and self.http_port:
            raise ValueError("--http-uds and --http-port exclude each other")
        if self.ollama and not self.serves_http:
            raise ValueError("--ollama needs --http-port: its clients look for 11434")
        for name in ("uds", "http_uds"):
            if getattr(self, name) is not None and self.workers > 1:
                raise ValueError(f"{flag(name)} needs --workers 1 (given: {self.workers})")
        if self.batch_dir is not None and self.workers > 1:
            raise ValueError(f"--batch-dir needs --workers 1 (given: {self.workers})")
        if self.uds is not None and self.tls is not None:
            raise ValueError("--uds and --tls-cert exclude each other")
        return self

    @model_validator(mode="after")
    def _limits_hold_for_all_workers(self) -> Self:
        for name in ("max_calls_per_peer", "max_connections_per_peer"):
            if self.shares_ports and getattr(self, name):
                raise ValueError(
                    f"{flag(name)} needs --workers 1 (given: {self.workers}): a worker knows only "
                    "its own connections, so an address could exceed the limit at several workers"
                )
        return self

    @model_validator(mode="after")
    def _admin_is_guarded(self) -> Self:
        if self.admin_port and not is_loopback(self.admin_host) and not self.authenticates:
            raise ValueError(
                f"AdminService on {self.admin_host} (--admin-host) is unauthenticated; set "
                "--api-key, --tenants with an admin among them, or --tls-client-ca"
            )
        return self

    @model_validator(mode="after")
    def _one_key_or_tenants(self) -> Self:
        if self.api_key is not None and self.tenants is not None:
            raise ValueError(
                "--api-key (OCTAVO_API_KEY) and --tenants exclude each other: tenants have their "
                "keys in their file"
            )
        return self

    @property
    def authenticates(self) -> bool:
        """Whether callers need a key or a certificate."""
        return any(
            setting is not None for setting in (self.api_key, self.tenants, self.tls_client_ca)
        )

    @property
    def listeners(self) -> list[Listener]:
        """Ports to listen on, except a default metrics port, which another may replace."""
        listeners = [] if self.uds is not None else [Listener(self.host, self.port)]
        if "metrics_port" in self.model_fields_set:
            listeners.append(metrics_listener(self.host, self.metrics_port))
        listeners.append(Listener(self.admin_host, self.admin_port, "--admin-port", zero=NO_PORT))
        return [*listeners, http_listener(self.http_host, self.http_port)]

    @property
    def serves_http(self) -> bool:
        """Whether HTTP is served, on a port or on a Unix socket."""
        return bool(self.http_port) or self.http_uds is not None

    @property
    def http_url(self) -> str:
        """URL of the HTTP server; empty if it is off."""
        if self.http_uds is not None:
            return f"unix:{self.http_uds}"
        scheme = "http" if self.tls is None else "https"
        address = http_listener(self.http_host, self.http_port).address
        return f"{scheme}://{address}{self.http_root_path}/"

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, key: SecretStr | None) -> SecretStr | None:
        """Reject a key that an HTTP header cannot hold."""
        if key is not None and not re.fullmatch("[!-~]+", key.get_secret_value()):
            raise ValueError("must be visible ASCII characters, without spaces")
        return key

    @field_validator("allow_image_urls")
    @classmethod
    def _check_image_urls(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            UrlPattern.parse(pattern)
        return patterns

    @field_validator("engine")
    @classmethod
    def _addresses(cls, addresses: list[str]) -> list[str]:
        """Reject malformed and repeated addresses."""
        if not addresses:
            raise ValueError("needs at least one HOST:PORT")
        for address in addresses:
            if not is_engine(address):
                raise ValueError(
                    f"{address!r} is neither HOST:PORT, such as 127.0.0.1:50052, nor "
                    f"{DNS_SCHEME}NAME:PORT, {KUBERNETES_SCHEME}LABEL=VALUE:PORT or "
                    f"{RAY_SCHEME}NAME"
                )
        if len(set(addresses)) != len(addresses):
            raise ValueError("names an engine twice")
        return addresses
