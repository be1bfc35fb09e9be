"""Open WebUI, as its registry has it, over Ollama's API and over OpenAI's, in a real browser.

It need not be in the project's environment: `pip install open-webui` anywhere, with its program on
PATH.
"""

import os
import shutil
import subprocess
import urllib.error
import urllib.request

import pytest

from octavo.common.ports import free_port
from tests.integration.harness import Server, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SECONDS = 120.0
OFFLINE = {
    "OFFLINE_MODE": "True",
    "BYPASS_EMBEDDING_AND_RETRIEVAL": "True",
    "RAG_EMBEDDING_MODEL": "",
    "ENABLE_VERSION_UPDATE_CHECK": "False",
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "secret",
    # Otherwise the small model goes on for up to 8,192 tokens.
    "DEFAULT_MODEL_PARAMS": '{"max_tokens": 64, "temperature": 0}',
}


@pytest.fixture(scope="module")
def both(demo_model, launch_shared) -> Server:
    """A server of both APIs, with room for Open WebUI's prompts."""
    port = free_port()
    roomy = ("--num-blocks", "1024", "--max-model-len", "8192", "--swap-space", "0")
    server = launch_shared("serve", "demo", *roomy, "--ollama", "--http-port", str(port))
    server.http = f"http://127.0.0.1:{port}"
    return server.wait_ready()


@pytest.fixture(params=["ollama", "openai"])
def open_webui(request, both, tmp_path):
    """Address of an Open WebUI that knows the server by one of its APIs."""
    if shutil.which("open-webui") is None:
        pytest.skip("needs open-webui on PATH")
    connection = {"OLLAMA_BASE_URL": both.http, "ENABLE_OPENAI_API": "False"}
    if request.param == "openai":
        connection = {"OPENAI_API_BASE_URL": f"{both.http}/v1", "OPENAI_API_KEY": "none"}
        connection["ENABLE_OLLAMA_API"] = "False"
    port, log = free_port(), tmp_path / "log"
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "DATA_DIR": str(tmp_path)}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)],
            stdout=sink, stderr=sink, cwd=tmp_path, env=environment | OFFLINE | connection,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or _answers(url), SECONDS, "its start")
        assert process.poll() is None, log.read_text()
        yield url
        assert " 500" not in log.read_text()
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


def test_a_chat(browser, open_webui, both):
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(SECONDS * 1000)
    page.goto(open_webui)
    page.click("text=Okay, Let's Go!")
    page.wait_for_selector("[aria-label='Selected model: demo']")
    page.click("#chat-input")
    page.keyboard.type("What is the capital of France?")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Response complete", state="attached")
    assert page.inner_text("#response-content-container .markdown-prose")
    page.close()
    assert both.metric("octavo_router_requests_total", code="OK")
    assert not both.metric("octavo_router_requests_total", code="INVALID_ARGUMENT")
