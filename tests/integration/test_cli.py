"""The commands that use a server, as processes against a real one."""

import json
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


def test_generate_reads_stdin_and_prints_json(octavo):
    done = octavo("generate", "-", "--raw", "-t", "0", "--max-tokens", "3", "--json", stdin="1, 2,")
    result = json.loads(done.stdout)
    assert result["outputs"][0]["reason"] == "length"
    assert len(result["outputs"][0]["token_ids"]) == 3


def test_generate_says_what_is_wrong(octavo):
    done = octavo("generate", "x", "--top-p", "2")
    assert done.returncode == 1
    assert "INVALID_ARGUMENT: " in done.stderr
    assert "top_p" in done.stderr
    assert "Traceback" not in done.stderr


def test_chat(octavo):
    lines = "What is the capital of France?\n/system Be brief.\n/system\n/quit\nnot read\n"
    done = octavo("chat", "-t", "0", "--max-tokens", "30", stdin=lines)
    assert done.returncode == 0
    assert done.stdout == "The capital of France is Paris.\n"
    assert "Be brief." in done.stderr


def test_status(octavo):
    shown = json.loads(octavo("status", "--json").stdout)
    assert shown["serving"] is True
    assert shown["models"][0]["name"] == "demo"
    assert shown["models"][0]["total_blocks"] == 512
    assert "demo" in octavo("status", "--once").stdout
