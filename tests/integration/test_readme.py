"""The README's commands, run verbatim; environment variables choose the ports."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import psutil
import pytest

from octavo.common.ports import free_port
from tests.integration.harness import wait_until

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
VENV = ROOT / ".venv"
PATIENCE = 240
READY = "is ready"

CLIENT_COMMANDS = (
    "source .venv/bin/activate",
    'octavo generate "What is the capital of France?"',
    "octavo chat",
    "octavo status",
)
HTTP_SERVER = "octavo serve demo --http-port 8000"
RUN_HERE = {"make demo", "make serve", *CLIENT_COMMANDS, HTTP_SERVER}
RUN_ELSEWHERE = {
    "octavo engine demo --port 50052",  # test_engines.py
    "octavo router --engine localhost:50052",
    "docker compose -f docker/compose.yaml up --build",  # test_compose_services.py: its commands
    "make test",  # continuous integration
    "make lint",
}


def test_every_command_is_run_by_a_test():
    assert set(COMMANDS) == RUN_HERE | RUN_ELSEWHERE
    assert len(COMMANDS) == len(set(COMMANDS))


@pytest.fixture
def environment() -> dict[str, str]:
    if not (VENV / ".installed").exists():
        pytest.skip("needs .venv, which `make test` creates")
    small = {"OCTAVO_NUM_BLOCKS": "512", "OCTAVO_SWAP_SPACE": "0.1", "OCTAVO_METRICS_PORT": "0"}
    small["OCTAVO_MAX_MODEL_LEN"] = "640"  # limits an answer without max_tokens
    address = f"localhost:{(port := free_port())}"
    return os.environ | small | {"OCTAVO_PORT": str(port), "OCTAVO_ADDRESS": address}


@contextmanager
def running(command: str, environment: dict[str, str], log: Path) -> Iterator[None]:
    """Run a server in the background once it prints that it is ready; stop it with Ctrl-C."""
    activate = "" if command.startswith("make") else "source .venv/bin/activate; exec "
    with log.open("wb") as sink:
        process = subprocess.Popen(
            ["bash", "-c", activate + command],
            cwd=ROOT, env=environment, stdout=sink, stderr=sink, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(
            lambda: READY in log.read_text() or process.poll() is not None,
            PATIENCE,
            f"{command}: ready",
        )
        assert process.poll() is None, log.read_text()
        yield
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
        _, left = psutil.wait_procs(children, 30)
        assert not left, "Ctrl-C ends every process"


def run(script: str, environment: dict[str, str], stdin: str = "") -> str:
    """Run commands in a shell; return their output."""
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=ROOT, env=environment, input=stdin, capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_make_demo(environment):
    printed = run("make demo", environment)
    assert "The capital of France is Paris." in printed
    assert "tokens/s" in printed
    assert "KV cache" in printed


@pytest.mark.slow
def test_serve_then_use_the_commands(environment, tmp_path):
    with running("make serve", environment, tmp_path / "log"):
        printed = run("\n".join(CLIENT_COMMANDS), environment, stdin="Say hello.\n")
    answers, _, table = printed.partition("blocks")  # of `octavo status`
    assert len(answers) > 50
    assert "demo" in table


@pytest.mark.slow  # test_http.py covers most of it
def test_the_http_server_and_openai_s_client(environment, tmp_path):
    (program,) = re.findall(r"```py\n(client = openai.*?)```", README, re.DOTALL)
    with running(HTTP_SERVER, environment, tmp_path / "log"):
        names = {"openai": openai}
        exec(program.replace("client.chat", "stream = client.chat"), names)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in names["stream"])
    assert len(text) > 20
