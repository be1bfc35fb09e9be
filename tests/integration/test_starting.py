"""A server that cannot or must not start: its message, and what it leaves behind."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest

from octavo.common.ports import free_port
from octavo.kernels.cpu.compile import find_compiler
from tests.integration.conftest import SMALL
from tests.integration.harness import wait_until

STOP_SECONDS = 30.0
"""Generous timeout: loading may take minutes."""

INTERRUPT_SECONDS = 10.0
"""Generous timeout: on an idle machine it takes less than a second."""


@pytest.fixture
def launch(launch):
    """Starts the program itself."""
    return partial(launch, program=True)


def descendants(server) -> set[psutil.Process]:
    try:
        return set(psutil.Process(server.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def command_line(process: psutil.Process) -> str:
    """Return a process's command; empty if it has ended or is a zombie."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def gone(processes) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def assert_refused(server, *said: str) -> None:
    """Check that it ends with these words, without a traceback or a process left."""
    seen: set[psutil.Process] = set()

    def ended() -> bool:
        seen.update(descendants(server))
        return server.process.poll() is not None

    wait_until(ended, 120, f"the end of {server.name}")
    assert server.process.returncode == 1, server.logs()
    for words in (*said, "error: "):
        assert words in server.logs()
    for words in ("Traceback", "Event loop is closed", "never retrieved", "never awaited"):
        assert words not in server.logs(), server.logs()
    wait_until(lambda: gone(seen), what="the end of its processes")


@pytest.mark.slow
def test_a_taken_default_metrics_port_falls_back_to_a_free_one(demo_model, launch):
    with ExitStack() as open_sockets:
        for port in (9151, 9152):
            taken = open_sockets.enter_context(socket.socket())
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                taken.bind(("127.0.0.1", port))
                taken.listen()
            except OSError:
                pass  # by another test: fine
        server = launch("serve", "--model", "demo", *SMALL, metrics=False).wait_ready()
        told = r"metrics served at another port.*address=http://127\.0\.0\.1:(\d+)/metrics.* taken="
        ports = re.findall(told, re.sub(r"\x1b\[[\d;]*m", "", server.logs()))
        pages = [
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
            for port in ports
        ]
    assert len(pages) == 2, server.logs()
    assert any(b"octavo_router_engines_up" in page for page in pages)
    assert any(b"octavo_engine_blocks" in page for page in pages)


@pytest.mark.parametrize("command", ["engine", pytest.param("serve", marks=pytest.mark.slow)])
def test_sigterm_while_it_compiles_the_kernels_ends_all(
    demo_model, launch, tmp_path, monkeypatch, command
):
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    (tmp_path / "c++").symlink_to(find_compiler() or "")
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))  # nothing is compiled by then
    server = launch(command, "--model", str(demo_model), *SMALL)

    def at_work() -> bool:
        assert server.process.poll() is None, server.logs()
        return any("paged_attention.cpp" in command_line(each) for each in descendants(server))

    wait_until(at_work, 120, "the compiler at work")
    processes = descendants(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(STOP_SECONDS) == 0, server.logs()
    wait_until(lambda: gone(processes), what="the end of its processes")
    assert "Traceback" not in server.logs()
    assert "Event loop is closed" not in server.logs()


INTERRUPTS = [
    ("serve", "", 0.0),  # while the command is imported
    ("serve", "Loading", 0.0),  # while the engine's process is started
    ("serve", "Loading", 0.5),  # while it imports
    pytest.param("serve", "router listening", 0.0, marks=pytest.mark.slow),
    ("engine", "Loading", 1.0),
]


@pytest.mark.parametrize(("command", "line", "delay"), INTERRUPTS)
def test_ctrl_c_before_it_is_ready_ends_all(demo_model, tmp_path, command, line, delay):
    """A terminal sends SIGINT to all processes of the group, including the engine's child."""
    log = tmp_path / "log"
    arguments = ["octavo", command, "demo", *SMALL, "--port", "0", "--metrics-port", "0"]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdout=sink, stderr=sink, process_group=0
        )
    try:
        if line:
            wait_until(lambda: line in log.read_text(), 120, f"{line!r} in the log")
        else:
            maps = Path(f"/proc/{process.pid}/maps")
            wait_until(lambda: "cygrpc" in maps.read_text(), 120, "the import of grpc")
        time.sleep(delay)
        processes = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(INTERRUPT_SECONDS) in {128 + signal.SIGINT, -signal.SIGINT}
        wait_until(lambda: gone(processes), what="the end of its processes")
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("command", "flag", "text", "said"),
    [
        ("serve", "--model", "{", "tokenizer.json is not valid JSON"),
        ("router", "--tokenizer", "{", "tokenizer.json is not valid JSON"),
        # Only transformers notices it, while the engine loads.
        pytest.param("serve", "--model", "{}", "tokenizer.json (2 bytes)", marks=pytest.mark.slow),
    ],
)
def test_a_broken_tokenizer_is_told(demo_model, launch, tmp_path, command, flag, text, said):
    model = tmp_path / "model"
    shutil.copytree(demo_model, model, copy_function=os.link)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").write_text(text)
    server = launch(command, flag, str(model), *(SMALL if command == "serve" else ()))
    assert_refused(server, said, "--tokenizer")


@pytest.mark.slow
def test_a_model_without_a_tokenizer_is_refused_before_it_is_loaded(demo_model, launch, tmp_path):
    """Engines start without a tokenizer, as routers may have --tokenizer; serve needs one."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        os.link(demo_model / name, model / name)
    server = launch("serve", "--model", str(model), *SMALL)
    engine = launch("engine", "--model", str(model), *SMALL)
    assert_refused(server, f"{model} has no tokenizer", "--tokenizer")
    assert "Loading" not in server.logs()
    engine.wait_ready()
    assert "routers need --tokenizer to use this engine" in engine.logs()


@pytest.mark.parametrize(
    ("command", "flag"), [("serve", "--model"), ("engine", "--model"), ("router", "--tokenizer")]
)
def test_a_hub_that_cannot_be_reached_is_told_once(launch, monkeypatch, tmp_path, command, flag):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    server = launch(command, flag, "owner/model")
    assert_refused(
        server, "'owner/model' is not a local directory", "HF_HUB_OFFLINE=1", "HTTPS_PROXY"
    )
    assert server.logs().count("cannot be reached") == 1
    assert "Retrying" not in server.logs()
