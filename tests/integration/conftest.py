"""Fixtures that start real processes."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.common.ports import free_port
from tests import chromium
from tests.integration.harness import Server

SMALL = ("--num-blocks", "512", "--max-model-len", "2048", "--swap-space", "0.1")
"""Memory flags: enough for tests, and quick to allocate."""

Launch = Callable[..., Server]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts servers by command and flags; stops all at the test's end."""
    yield from _launcher(tmp_path)


@pytest.fixture(scope="session")
def launch_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Like `launch`, for servers that several tests share."""
    yield from _launcher(tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="session")
def served(demo_model: Path, launch_shared: Launch) -> Server:
    """`octavo serve --model demo`, ready. For tests that do not change it.

    `http` is its HTTP address.
    """
    port = free_port()
    server = launch_shared("serve", "--model", "demo", *SMALL, "--http-port", str(port))
    server.http = f"http://127.0.0.1:{port}"
    return server.wait_ready()


@pytest.fixture(scope="module")
def browser():
    """Chromium; for one module, as its event loop runs until it is closed."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install 'octavo[browser]'"
    )
    with playwright.sync_playwright() as driver:
        path = chromium.find(driver.chromium.executable_path)
        browser = driver.chromium.launch(executable_path=path, args=chromium.ARGUMENTS)
        yield browser
        browser.close()


def _launcher(directory: Path) -> Iterator[Launch]:
    servers: list[Server] = []
    numbers = itertools.count()

    def start(command: str, *arguments: str, **options: Any) -> Server:
        log = directory / f"{command}-{next(numbers)}.log"
        servers.append(Server(command, *arguments, log=log, **options))
        return servers[-1]

    yield start
    for server in reversed(servers):
        server.stop()
