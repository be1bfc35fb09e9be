"""The playground in a real browser, over a real model."""

import re
import time

import pytest

from benchmarks.fixture import make_model
from octavo.common.ports import free_port

SECONDS = 120_000
"""Generous timeout in milliseconds: CI's machines may be busy."""


@pytest.fixture
def page(browser, served):
    """The page; the test fails if it reports an error or sends requests to other servers."""
    troubles = []
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(SECONDS)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text))
    page.on(
        "request",
        lambda request: request.url.startswith(served.http) or troubles.append(request.url),
    )
    page.goto(served.http)
    page.wait_for_selector("#model option", state="attached")
    yield page
    page.close()
    assert troubles == []


def shown(page, selector: str) -> int:
    return int(page.inner_text(selector))


def until(page, condition, what: str) -> None:
    """Poll here: the page's security policy forbids evaluating code there."""
    deadline = time.monotonic() + SECONDS / 1000
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true"
        page.wait_for_timeout(50)


def test_a_chat_streams_and_goes_on(page):
    page.click("#settings summary")
    page.fill("#temperature", "0")
    page.fill("#prompt", "What is the capital of France?")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".answer:not(.working)")
    assert page.inner_text(".answer .text") == "The capital of France is Paris."
    assert "done" in page.inner_text(".answer .facts")
    assert "8 tokens" in page.inner_text("#summary")
    until(page, lambda: shown(page, "[data-state=cached] output") > 0, "a block is cached")
    page.fill("#max_tokens", "4")
    page.fill("#prompt", "And of Italy?")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".answer:nth-of-type(2):not(.working)")
    assert "max tokens" in page.inner_text(".answer:nth-of-type(2) .facts")
    cached = int(page.inner_text("#summary").split(" · ")[-1].split()[0])
    assert cached >= 32, "the conversation's beginning was not found in the cache"


def test_a_batch_fills_blocks_and_stopping_frees_them(page):
    page.click("[data-mode=batch]")
    page.fill("#prompt", "\n".join(f"Count to {100 + i}." for i in range(8)))
    page.click("#settings summary")
    page.fill("#max_tokens", "400")
    page.fill("#temperature", "0")  # a sampled answer may be empty
    page.click("#send")
    until(page, lambda: shown(page, "[data-value=running]") == 8, "all run")
    until(page, lambda: all(page.locator(".text").all_inner_texts()), "all have begun")
    assert shown(page, ".in-use") > 8
    assert shown(page, "[data-state=shared] output") > 0
    assert re.match(r"[1-9]\d* shared, [1-9]\d* used", page.get_attribute(".blocks", "aria-label"))
    page.keyboard.press("Escape")
    until(page, lambda: shown(page, ".in-use") == 0, "all is free")
    assert page.locator(".answer").count() == 8
    assert page.locator(".answer.working").count() == 0
    assert "stopped" in page.inner_text(".answer .facts")


def test_text_is_gone_on_from(page):
    page.click("[data-mode=text]")
    page.click("#settings summary")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "6")
    page.fill("#prompt", "1, 2, 3, <b>4</b>, 5,")
    page.click("#send")
    page.wait_for_selector(".answer:not(.working)")
    assert page.inner_text(".asked") == "1, 2, 3, <b>4</b>, 5,"
    assert page.inner_text(".text").strip()


@pytest.mark.slow
def test_a_model_is_loaded_when_it_is_asked_for(browser, launch, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "models.toml").write_text(
        f"[models.tiny]\nmodel = {make_model(tmp_path / 'tiny')!r}\n[models.other]\n"
    )
    port = free_port()
    launch(
        *("serve", "--models", str(tmp_path / "models.toml"), "--http-port", str(port)),
        program=True,  # engines cannot be forked from a process that serves
    ).wait_ready()
    page = browser.new_page()
    page.set_default_timeout(SECONDS)
    page.goto(f"http://127.0.0.1:{port}")
    page.wait_for_selector("#model option", state="attached")
    names = page.locator("#model option")
    assert names.all_inner_texts() == ["other (unloaded)", "tiny (unloaded)"]
    assert "No model is loaded" in page.inner_text("#notice")
    page.select_option("#model", "tiny")
    page.click("[data-mode=text]")
    page.fill("#prompt", "Once")
    page.press("#prompt", "Enter")
    until(page, lambda: "tiny (loading)" in names.all_inner_texts(), "loading")
    until(page, lambda: names.all_inner_texts() == ["other (unloaded)", "tiny"], "loaded")
    page.wait_for_selector(".answer:not(.working)")
    assert page.input_value("#model") == "tiny"
    page.close()
