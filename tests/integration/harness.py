"""Start, watch, read, stop and kill real octavo processes."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.metrics import Metrics
from octavo.common.ports import free_port
from tests import preloaded

READY_SECONDS = 120.0
"""Generous timeout: CI's machines may be busy. Other tests check promised times."""


class Server:
    """One `octavo serve`, `octavo router` or `octavo engine`.

    Args:
        command: "serve", "router" or "engine".
        *arguments: Its flags, except --port and --metrics-port.
        log: File for its output.
        port: Port to listen on; default: a free one.
        metrics: Whether --metrics-port is given.
        program: Whether to run the program itself, not a fork of a process that has imported it.
        module: The module that runs `octavo`, with its own arguments.
    """

    process: subprocess.Popen[bytes] | preloaded.Process

    def __init__(
        self,
        command: str,
        *arguments: str,
        log: Path,
        port: int | None = None,
        metrics: bool = True,
        program: bool = False,
        module: tuple[str, ...] | None = None,
    ) -> None:
        port, metrics_port = port or adjacent_ports(2)[0], adjacent_ports(2)[0]
        self.name = command
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.metrics_port = metrics_port
        self.log_path = log
        self.started = time.monotonic()
        own = ["--port", str(port)] + ["--metrics-port", str(metrics_port)] * metrics
        if not program and module is None:
            self.process = preloaded.Process("octavo", [command, *arguments, *own], log)
            return
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *(module or ("octavo",)), command, *arguments, *own],
                stdout=sink,
                stderr=sink,
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def children(self) -> list[psutil.Process]:
        """Return its descendants, such as serve's engine."""
        return psutil.Process(self.pid).children(recursive=True)

    def logs(self) -> str:
        """Return its output so far."""
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, timeout: float = READY_SECONDS) -> "Server":
        """Wait until gRPC health says SERVING; fail with the log if it does not."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(
                    f"{self.name} ended with code {self.process.returncode}:\n{self.logs()}"
                )
            if self.is_serving():
                return self
            time.sleep(0.05)
        raise AssertionError(f"{self.name} was not ready in {timeout} s:\n{self.logs()}")

    def is_serving(self) -> bool:
        """Return whether its health service says SERVING; False if nothing answers."""
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                response = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
            except grpc.RpcError:
                return False
        return response.status == health_pb2.HealthCheckResponse.SERVING

    def metrics(self, *, port: int | None = None) -> Metrics:
        """Return its current metrics.

        Args:
            port: Metrics port; default: this process'. serve's engine uses the next one.
        """
        return Metrics(port or self.metrics_port)

    def metric(self, name: str, *, port: int | None = None, **labels: str) -> float:
        """Return a Prometheus sample's value, summed over other labels."""
        return self.metrics(port=port).value(name, **labels)

    def terminate(self, timeout: float = 60) -> int:
        """Send SIGTERM, wait for the end and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        """End the process in any state."""
        if self.process.poll() is None:
            try:
                self.terminate(40)
            except subprocess.TimeoutExpired:
                self.kill()


def adjacent_ports(count: int) -> list[int]:
    """Return `count` adjacent free loopback ports outside the ephemeral range."""
    while True:
        start = free_port()
        if all(_free(port) for port in range(start, start + count)):
            return list(range(start, start + count))


def wait_until(condition, timeout: float = 10.0, what: str = "the condition") -> None:
    """Poll until `condition()` is true."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true in {timeout} s")
        time.sleep(0.02)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
