"""Open WebUI, as its registry has it, over Ollama's API and over OpenAI's, in a real browser.

It need not be in the project's environment: `pip install open-webui` anywhere, with its program on
PATH.
"""

import base64
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from octavo.common.ports import free_port
from tests.integration.harness import Server, wait_until
from tests.vision_models import FAMILIES, save_family

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
    "ENABLE_TITLE_GENERATION": "False",
    "ENABLE_TAGS_GENERATION": "False",
    "ENABLE_FOLLOW_UP_GENERATION": "False",
}


QUESTION = "What is shown here?"
LONGEST = 32_768
"""Maximum tokens of the tiny model, to which each byte of Open WebUI's instructions is a token."""


@pytest.fixture(scope="module", params=["demo", "tiny"])
def both(request, demo_model, launch_shared, tmp_path_factory) -> Server:
    """A server of both APIs, with room for Open WebUI's prompts; `tiny` reads images."""
    port, model = free_port(), "demo"
    if request.param == "tiny":
        path = tmp_path_factory.mktemp("models") / "tiny"
        family = FAMILIES["smolvlm"]
        text = family.config["text_config"] | {"max_position_embeddings": LONGEST}
        save_family("smolvlm", replace(family, config=family.config | {"text_config": text}), path)
        model = str(path)
    longest = LONGEST if request.param == "tiny" else 8192
    roomy = ("--num-blocks", str(longest // 8), "--max-model-len", str(longest))
    roomy = (*roomy, "--swap-space", "0")
    flags = ("--served-model-name", request.param, "--ollama", "--http-port", str(port))
    server = launch_shared("serve", model, *roomy, *flags)
    server.http, server.model = f"http://127.0.0.1:{port}", request.param
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


def test_a_chat(browser, open_webui, both, tmp_path):
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(SECONDS * 1000)
    refused = both.metric("octavo_router_requests_total", code="INVALID_ARGUMENT")
    text_tokens = _chat(page, open_webui, both)
    assert both.metric("octavo_router_requests_total", code="OK")
    assert both.metric("octavo_router_requests_total", code="INVALID_ARGUMENT") == refused
    png = tmp_path / "image.png"
    Image.effect_noise((400, 400), 50).convert("RGB").save(png)
    used = _chat(page, open_webui, both, png)
    if both.model == "tiny":
        image_tokens = _ask_directly(both, png.read_bytes()) - _ask_directly(both)
        assert used - text_tokens >= image_tokens > 30
        assert both.metric("octavo_router_requests_total", code="INVALID_ARGUMENT") == refused
    else:
        assert "reads no images" in page.inner_text("#response-content-container")
    page.close()


def _chat(page, url: str, server: Server, image: Path | None = None) -> float:
    """Ask the question in a new chat, about an image if given; return the prompt's tokens."""
    before = server.metric("octavo_router_prompt_tokens_total")
    page.goto(url)
    if image is None:
        page.click("text=Okay, Let's Go!")
    page.wait_for_selector(f"[aria-label='Selected model: {server.model}']")
    if image is not None:
        page.set_input_files("input[type=file] >> nth=0", image)
        page.wait_for_selector("[data-cy=image]")
    page.click("#chat-input")
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Response complete", state="attached")
    if server.model == "demo" and image is None:  # the other model's tokens may be no text
        assert page.inner_text("#response-content-container .markdown-prose")
    return server.metric("octavo_router_prompt_tokens_total") - before


def _ask_directly(server: Server, png: bytes = b"") -> int:
    """Return the number of prompt tokens of the question, with an image if there is one."""
    parts = [{"type": "text", "text": QUESTION}]
    if png:
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": parts}]}
    request = urllib.request.Request(
        f"{server.http}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["usage"]["prompt_tokens"]
