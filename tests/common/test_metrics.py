import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from octavo.common.metrics import serve_metrics
from octavo.common.ports import free_port


def test_served_while_inside():
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(3)
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    with (
        serve_metrics(registry, "127.0.0.1", port),
        urllib.request.urlopen(url, timeout=5) as response,
    ):
        assert "things_total 3.0" in response.read().decode()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)


def test_port_0_is_off():
    with serve_metrics(CollectorRegistry(), "127.0.0.1", 0):
        pass


def test_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(OSError, match=f"127.0.0.1:{port} .*--metrics-port"),
            serve_metrics(CollectorRegistry(), "127.0.0.1", port),
        ):
            pass
