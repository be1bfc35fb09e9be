"""A server checks its settings before it loads anything."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from octavo.cli import app
from octavo.cli.serve import listeners_of_engines, settings_of_engines
from octavo.common import logging
from octavo.common.models import resolve as models
from octavo.common.ports import Listener
from octavo.engine.settings import EngineSettings
from octavo.router.settings import RouterSettings
from tests.integration.harness import adjacent_ports

CASES = [
    *((command, "--port") for command in ("serve", "engine", "router")),
    *((command, "--metrics-port") for command in ("serve", "engine", "router")),
    *(
        (command, flag)
        for command in ("serve", "router")
        for flag in ("--http-port", "--admin-port")
    ),
]


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch):
    """Fail if a model is resolved or a server is created; keep the tests' own log."""

    def fail(*_: object) -> None:
        raise AssertionError("not checked before this")

    monkeypatch.setattr(models, "resolve_checkpoint", fail)
    monkeypatch.setitem(sys.modules, "octavo.engine.server", None)
    monkeypatch.setitem(sys.modules, "octavo.router.server", None)
    monkeypatch.setattr(logging, "configure", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def taken():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def refused(*arguments: object, code: int = 1) -> str:
    """Run a command that must fail; return its message."""
    model = () if arguments[0] == "router" else ("demo",)
    own = () if "--port" in arguments else ("--port", "0")
    given = map(str, (arguments[0], *model, *own, *arguments[1:]))
    result = CliRunner().invoke(app, list(given))
    assert result.exit_code == code, result.output
    return result.stderr


@pytest.mark.parametrize(("command", "flag"), CASES)
def test_taken_ports(taken, command, flag):
    said = refused(command, flag, taken)
    assert f"on 127.0.0.1:{taken} (address already in use); choose another {flag}" in said


def test_the_engines_metrics_port_is_named_after_the_one_that_was_given(taken):
    said = refused("serve", "--metrics-port", taken - 1)
    assert f"cannot serve the engine's metrics on 127.0.0.1:{taken} (" in said
    assert f"it is the port after --metrics-port {taken - 1}, and the engine's" in said
    assert "choose another --metrics-port, or 0 for none" in said
    assert "there is none" in refused("serve", "--metrics-port", 65535, code=2)


def test_each_engine_has_a_metrics_port(taken):
    router = RouterSettings(metrics_port=taken - 2)
    engine = EngineSettings(model="demo", metrics_port=taken - 1)
    engines = settings_of_engines(router, engine, 2)
    assert [each.metrics_port for each in engines] == [taken - 1, taken]
    with pytest.raises(OSError, match=r"cannot serve engine 2's metrics .* is 2 ports after"):
        listeners_of_engines(router, engines)[1].check()
    assert listeners_of_engines(router, [EngineSettings(model="demo")] * 2) == []
    none = RouterSettings(metrics_port=0)
    assert {each.metrics_port for each in settings_of_engines(none, engine, 2)} == {0}
    last = RouterSettings(metrics_port=65534)
    with pytest.raises(typer.BadParameter, match="each engine's metrics need the next port"):
        settings_of_engines(last, engine, 2)


def test_a_port_given_twice():
    before, port = adjacent_ports(2)
    said = refused("serve", "--port", port, "--http-port", port)
    assert f"--port and --http-port both take port {port}: choose different ports" in said
    said = refused("serve", "--port", port, "--metrics-port", before)
    assert f"--port and --metrics-port both take port {port} (it is the port after" in said


def test_hosts_of_other_machines():
    said = refused("router", "--host", "192.0.2.1")
    assert "cannot listen on 192.0.2.1:0 (cannot assign requested address)" in said


@pytest.mark.parametrize("command", ["serve", "engine", "router"])
def test_tls_files(command, tmp_path, authority):
    cert, key = authority.issue("server")
    said = refused(command, "--tls-cert", tmp_path / "none.pem", "--tls-key", key)
    assert f"cannot read {tmp_path}/none.pem" in said
    other = authority.issue("other")[1]
    assert "not a matching PEM" in refused(command, "--tls-cert", cert, "--tls-key", other)


@pytest.mark.parametrize("command", ["serve", "router"])
def test_tenants(command, tmp_path):
    file = tmp_path / "tenants.toml"
    assert str(file) in refused(command, "--tenants", file)
    file.write_text("[[tenant]\n")
    assert "is not valid TOML" in refused(command, "--tenants", file)


@pytest.mark.parametrize("command", ["serve", "engine"])
def test_a_cache_that_cannot_be_written(command, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    said = refused(command)
    assert f"cannot write to the cache directory {tmp_path}/file/cache" in said
    assert "OCTAVO_CACHE_DIR" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_to_read_only_is_used_if_something_is_in_it(tmp_path, monkeypatch):
    from octavo.common.models.cache import check_usable

    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    (tmp_path / "kernels").mkdir()
    tmp_path.chmod(0o500)
    check_usable()
    (tmp_path / "kernels").rmdir()
    with pytest.raises(OSError, match="permission denied"):
        check_usable()


def test_serve_has_one_router_process(monkeypatch):
    monkeypatch.setenv("OCTAVO_WORKERS", "2")
    assert "one process" in refused("serve", code=2)


def test_limits_of_tenants_need_one_worker(tmp_path):
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[alice]\nmax_concurrency = 4\n")
    said = refused("router", "--workers", 2, "--tenants", tenants)
    assert "[alice] max_concurrency needs --workers 1" in said


def test_a_reserved_port_is_taken_for_all_but_those_who_share_it():
    with Listener("127.0.0.1", 0).reserve() as reserved:
        port = reserved.getsockname()[1]
        with socket.create_server(("127.0.0.1", port), reuse_port=True):
            with pytest.raises(OSError, match="address already in use"):
                Listener("127.0.0.1", port).check()
            with pytest.raises(OSError, match="choose another --port"):
                Listener("127.0.0.1", port).reserve()
        with pytest.raises(ConnectionRefusedError):  # the reservation itself does not listen
            socket.create_connection(("127.0.0.1", port), 5)


def test_a_taken_port_is_all_that_the_terminal_shows(taken):
    """gRPC's C core logs nothing; in a new process, as gRPC reads its environment once."""
    code = (
        "import asyncio; from octavo.common.listening import listen; "
        "from octavo.common.rpc import create_server\n"
        "async def main():\n"
        "    server, _ = await create_server({}, max_message_bytes=1024)\n"
        f"    try: server.add_insecure_port('127.0.0.1:{taken}')\n"
        "    except RuntimeError: pass\n"
        f"    listen(server, '127.0.0.1', {taken}, None)\n"
        "asyncio.run(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"},
    )
    assert "address already in use" in done.stderr.splitlines()[-1]
    assert "E0000" not in done.stderr
    assert "add_port" not in done.stderr.lower()
