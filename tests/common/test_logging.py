"""Each test logs in its own process, since logging is set up once per process."""

import json
import subprocess
import sys

PROGRAM = """
import logging, sys
import structlog
from octavo.common.logging import configure

configure(sys.argv[1], sys.argv[2])
with structlog.contextvars.bound_contextvars(request_id="r1"):
    structlog.get_logger("octavo.x").info("hello", tokens=3)
    logging.getLogger("lib").warning("old %s", "style")
logging.getLogger("httpx").info("chatter")
structlog.get_logger("octavo.x").debug("detail")
secret = "a prompt"
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger("octavo.x").exception("oh")
"""


def run(log_format: str, level: str = "info") -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format, level],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr


def test_json_lines():
    hello, old, oh = map(json.loads, run("json").splitlines())
    assert hello["event"] == "hello"
    assert hello["timestamp"].endswith("Z")
    picked = {key: hello[key] for key in ("level", "logger", "request_id", "tokens")}
    assert picked == {"level": "info", "logger": "octavo.x", "request_id": "r1", "tokens": 3}
    assert (old["event"], old["level"], old["request_id"]) == ("old style", "warning", "r1")
    assert oh["exception"][0]["exc_type"] == "ZeroDivisionError"
    assert "a prompt" not in json.dumps(oh)


def test_console_without_colours_where_there_is_no_terminal():
    text = run("console")
    assert "\x1b[" not in text
    assert "request_id=r1" in text
    assert "ZeroDivisionError: division by zero" in text


def test_levels():
    assert "detail" in run("json", "debug")
    assert "hello" not in run("json", "warning")
