"""Every error appears in place of the answer, in the server's words, and can be fixed there."""

import pytest

from octavo.router.tenants.tenant import hash_key

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def tenants(tmp_path):
    file = tmp_path / "tenants.toml"
    file.write_text(
        f"""
        [alice]
        keys = ["{hash_key("alice-key")}"]
        [bob]
        keys = ["{hash_key("bob-key")}"]
        requests_per_second = 0.5
        """
    )
    return file


@pytest.mark.slow
async def test_a_missing_key_is_asked_for(playground, scripted, tenants):
    async with playground(scripted("abc"), tenants=tenants, ready=False) as shown:
        page = shown.page
        await page.wait_for_selector("#key-dialog[open]")  # by itself, once
        await page.keyboard.press("Escape")
        await page.wait_for_selector("#key-button.refused")
        await shown.ask()
        await shown.answered()
        assert "an API key is needed" in await shown.text(".problem .message")
        await page.click(".problem .give-key")
        await page.fill("#key", "guess")
        await page.press("#key", "Enter")
        await page.click(".problem .retry")
        await shown.answered()
        assert "the API key is unknown" in await shown.text(".problem .message")
        await page.click("#key-button")
        await page.fill("#key", "alice-key")
        await page.click("#key-dialog .primary")
        await page.wait_for_selector("#key-button:not(.refused)")
        await page.click(".problem .retry")
        await shown.answered()
        assert await shown.text(".text") == "abc"
        assert await shown.count(".problem") == 0
        kept = await page.evaluate("JSON.stringify([{...localStorage}, sessionStorage])")
        assert kept.count("alice-key") == 1, "the key is kept in one place"
        await page.click("#key-button")
        await page.fill("#key", "another")
        await page.keyboard.press("Escape")
        assert await page.evaluate("sessionStorage.getItem('octavo-key')") == "alice-key"


async def test_a_quota_says_when_to_try_again(playground, scripted, tenants):
    async with playground(scripted("abc"), tenants=tenants, ready=False) as shown:
        await shown.page.fill("#key", "bob-key")
        await shown.page.press("#key", "Enter")
        await shown.page.wait_for_selector("#model option", state="attached")
        for i in range(1, 32):
            await shown.ask()
            await shown.answered(i)
            if await shown.count(".problem"):
                break
        assert "requests" in await shown.text(".problem .message")
        retry = shown.page.locator(".problem .retry")
        assert await retry.is_disabled()
        assert (await retry.inner_text()).startswith("Try again in ")
        await shown.page.click(".problem .retry:enabled")
        await shown.answered(i)
        assert await shown.count(".problem") == 0


async def test_a_refused_field_is_shown_and_marked(playground, scripted):
    async with playground(scripted("abc")) as shown:
        page = shown.page
        await page.fill("#prompt", "hi")
        await shown.enter("top_p", "2")
        await page.press("#prompt", "Enter")  # the browser's own check opens the settings
        await page.wait_for_selector("#settings[open]")
        assert await shown.count(".answer") == 0
        await page.evaluate("document.querySelector('#composer').noValidate = true")
        await page.press("#prompt", "Enter")
        await shown.answered()
        assert "top_p must be in" in await shown.text(".problem .message")
        assert await page.get_attribute("#top_p", "aria-invalid") == "true"
        await page.fill("#top_p", "1")
        assert await page.get_attribute("#top_p", "aria-invalid") is None
        await page.click(".problem .retry")
        await shown.answered()
        assert await shown.text(".text") == "abc"


async def test_a_stream_cut_in_the_middle(playground, scripted):
    """The only engine is lost."""
    engine = scripted("x" * 300, interval=0.01)
    settings = {"max_migrations": 0}
    async with playground(engine, **settings) as shown:
        await shown.ask()
        await shown.until_text(".text", "xxx")
        await engine.kill()
        await shown.answered()
        assert "xxx" in await shown.text(".text")
        assert await shown.text(".problem .message")
        assert "failed" in await shown.text(".facts")
        await shown.until_text("#notice", "No engine")
        engine.interval = 0.0
        await engine.start(int(engine.address.rpartition(":")[2]))
        await shown.page.click(".problem .retry")
        await shown.answered()
        assert await shown.text(".text") == "x" * 300


async def test_the_server_is_gone(playground, scripted):
    engine = scripted("x" * 300, interval=0.01)
    async with playground(engine) as shown:
        await shown.ask()
        await shown.until_text(".text", "xxx")
        await shown.app.router.stop()
        await shown.answered()
        assert "xxx" in await shown.text(".text")
        assert await shown.text(".problem .message")
        await shown.ask("again")
        await shown.answered(2)
        message = await shown.text(".answer:last-child .problem .message")
        assert message.startswith("The server cannot be reached")
        await shown.until_text("#notice", "The server cannot be reached")


@pytest.mark.slow
async def test_a_batch_shows_its_problem_once(playground, scripted):
    async with playground(scripted("abc")) as shown:
        page = shown.page
        await page.click("[data-mode=batch]")
        await page.fill("#prompt", "one\ntwo\nthree")
        await page.evaluate("document.querySelector('#composer').noValidate = true")
        await shown.enter("temperature", "-1")
        await page.click("#send")
        await shown.answered(3)
        assert await shown.count(".problem") == 1
        assert "temperature must be in" in await shown.text(".problem .message")
        await shown.enter("temperature", "1")
        await page.click(".problem .retry")
        await shown.until_text("#answers-batch .answer:nth-of-type(3) .text", "abc")
        assert await shown.count(".problem") == 0


@pytest.mark.slow
async def test_a_failed_turn_is_left_out_of_the_chat(playground, scripted, encode):
    engine = scripted("abc")
    async with playground(engine) as shown:
        await shown.page.evaluate("document.querySelector('#composer').noValidate = true")
        await shown.enter("top_p", "2")
        await shown.ask("one")
        await shown.answered()
        await shown.enter("top_p", "1")
        await shown.ask("two")
        await shown.answered(2)
        chat = "<s>user:two<s>assistant:"
        assert list(engine.submits[-1].prompt_token_ids) == encode(chat)
        assert not await shown.page.is_visible(".problem .retry"), "only the last is asked again"
