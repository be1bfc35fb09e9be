"""How both clients connect."""

DEFAULT_ADDRESS = "localhost:50051"
"""Where `octavo serve` and `octavo router` listen unless told otherwise."""

OPTIONS: tuple[tuple[str, int], ...] = (
    # Log-probabilities of a long prompt outgrow grpc's 4 MiB.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A server that comes back is found within seconds, not after minutes.
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

Metadata = tuple[tuple[str, str | bytes], ...]

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
