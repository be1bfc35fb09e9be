"""Every background task and thread of real servers is killed: none of them ends without a word."""

import re
import urllib.request

import grpc
import pytest

import octavo
from octavo.common.ports import free_port
from octavo.router.tenants.tenant import hash_key
from tests.integration.conftest import SMALL
from tests.integration.harness import wait_until
from tests.integration.saboteur import KilledByTestError

KEY = "key"
NOT_OCTAVOS = re.compile(r"MainThread|Thread-\d+.*|uvloop_\d+|asyncio_\d+|saboteur|run\.<locals>.*")
ENDING = {"signal", "parts", "start", "the server", "AdminService", "HTTP", "server", "link"}
ENDING |= {"http", "http-accept", "accepting", "serving", "gRPC"}
ENDING |= {"engine-core", "heartbeat", "the engine's core", "the engine's heartbeat"}
"""Those whose end is the process'."""
RESTARTED = {
    "router": {"health", "tenants", "discovery", "metrics", "engine:", "session-", "tokenizer"},
    "engine": {"metrics", "session-"},
}
VITAL = {"router": "http", "engine": "engine-core"}


class Victim:
    """A server that can be struck."""

    def __init__(self, server, folder):
        self.server = server
        self.folder = folder

    def names(self) -> set[str]:
        told = self.folder / "names"
        told.unlink(missing_ok=True)  # it may be of a moment ago
        wait_until(told.exists, 20, "its names")
        found = set(told.read_text().splitlines())
        return {name for name in found if not NOT_OCTAVOS.fullmatch(name)}

    def kill(self, name: str) -> None:
        order = self.folder / "kill.new"
        order.write_text(name)
        order.rename(self.folder / "kill")
        wait_until(lambda: not (self.folder / "kill").exists(), 20, f"the blow to {name}")


@pytest.fixture
def victim(launch, tmp_path):
    def make(command, *flags):
        folder = tmp_path / f"{command}.saboteur"
        folder.mkdir()
        module = ("tests.integration.saboteur", str(folder))
        return Victim(launch(command, *flags, module=module), folder)

    return make


@pytest.mark.slow  # tests/common/test_background.py covers what restarts them
def test_no_task_or_thread_ends_in_silence(demo_model, victim, tmp_path):
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[nobody]\n")
    engine = victim("engine", "--model", "demo", *SMALL)
    http = ("--http-port", str(free_port()), "--admin-port", str(free_port()))
    address = engine.server.address
    named = ("--engine", address, "--engine", f"dns:///localhost:{free_port()}")
    router = victim("router", *named, "--tenants", str(tenants), *http)
    engine.server.wait_ready()
    router.server.wait_ready()
    with octavo.Client(router.server.address, api_key=KEY) as client:
        with pytest.raises(octavo.UnauthenticatedError):
            client.tokenize("a")
        tenants.write_text(f'[alice]\nkeys = ["{hash_key(KEY)}"]\n')
        wait_until(lambda: works(client), 30, "the new key")
        for struck in (router, engine):
            kinds = RESTARTED[struck.server.name]
            names = struck.names() - ENDING
            for kind in kinds:
                assert any(name.startswith(kind) for name in names), (kind, names)
            for name in sorted(names):
                assert name.startswith(tuple(kinds)), f"{name} is not known to be looked after"
                if name in struck.names():  # a death may take others with it
                    strike(struck, name, client)
            scrape(struck.server)
        tenants.write_text("[nobody]\n")
        wait_until(lambda: refused(client), 30, "the key's end")
    for struck in (router, engine):
        struck.kill(VITAL[struck.server.name])
        assert struck.server.process.wait(60) == 1
        assert "stopped unexpectedly" in struck.server.logs()
        assert KilledByTestError.__name__ in struck.server.logs()


def strike(struck: Victim, name: str, client) -> None:
    """Kills a part, which tells of it, and goes on."""
    before = len(struck.server.logs())
    struck.kill(name)
    if name.startswith("tokenizer"):  # it sees that it is dead when it is given something to do
        codes = {code_of(client) for _ in range(4)}
        assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.INTERNAL}
    wait_until(lambda: told(struck.server.logs()[before:]), 20, f"a word on the end of {name}")
    assert struck.server.process.poll() is None, struck.server.logs()
    wait_until(lambda: works(client), 30, f"service after the end of {name}")


def code_of(client) -> grpc.StatusCode:
    try:
        client.tokenize("a", timeout=20)
    except octavo.Error as error:
        return error.code
    return grpc.StatusCode.OK


def told(log: str) -> bool:
    return KilledByTestError.__name__ in log and "failed" in log


def works(client) -> bool:
    try:
        return len(client.tokenize("hello", timeout=20)) > 0 and bool(
            client.generate("hello", max_tokens=2, ignore_eos=True, timeout=20).complete()
        )
    except octavo.Error:
        return False


def refused(client) -> bool:
    try:
        client.tokenize("hello", timeout=20)
    except octavo.UnauthenticatedError:
        return True
    return False


def scrape(server) -> None:
    url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    assert b"octavo_tasks" in urllib.request.urlopen(url, timeout=10).read()
