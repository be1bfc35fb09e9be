"""The commands that use a server, as processes against a real one."""

import subprocess
import sys

import pytest


@pytest.fixture
def octavo(served):
    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "octavo", *arguments, "--address", served.address],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def test_generate(octavo):
    done = octavo("generate", "-t", "0", "What is the capital of France?")
    assert done.stdout == "The capital of France is Paris.\n"
    assert "37 + 8 tokens in" in done.stderr
    assert "eos" in done.stderr


def test_chat(octavo):
    lines = "What is the capital of France?\n/system Be brief.\n/system\n/quit\nnot read\n"
    done = octavo("chat", "-t", "0", "--max-tokens", "30", stdin=lines)
    assert done.returncode == 0
    assert done.stdout == "The capital of France is Paris.\n"
    assert "Be brief." in done.stderr
