"""A chat continues after a reload, and nobody else can see it."""

import json

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

STORED = "JSON.stringify({local: {...localStorage}, session: {...sessionStorage}})"


async def test_a_chat_goes_on_after_a_reload(playground, scripted, encode):
    engine = scripted("so **be** it")
    async with playground(engine) as shown:
        await shown.page.click("#settings summary")
        await shown.page.fill("#system", "be brief")
        await shown.page.fill("#temperature", "0.25")
        await shown.ask("one")
        await shown.answered()
        facts = await shown.text(".facts")
        await shown.page.fill("#prompt", "half a tho")
        await shown.reload()
        assert await shown.text(".asked") == "one"
        assert await shown.text(".answer strong") == "be"
        assert await shown.text(".facts") == facts
        assert "12 tokens" in await shown.text("#summary")
        assert await shown.page.input_value("#prompt") == "half a tho"
        assert await shown.page.input_value("#temperature") == "0.25"
        await shown.ask("two")
        await shown.answered(2)
        turns = "<s>system:be brief<s>user:one<s>assistant:so **be** it<s>user:two<s>assistant:"
        assert list(engine.submits[-1].prompt_token_ids) == encode(turns)
        assert engine.submits[-1].sampling.temperature == 0.25


@pytest.mark.slow
async def test_a_reload_keeps_what_came_of_an_answer(playground, scripted):
    engine = scripted("x" * 400, interval=0.01)
    async with playground(engine) as shown:
        await shown.ask()
        await shown.until_text(".text", "xxx")
        await shown.reload()
        assert "xxx" in await shown.text(".text")
        assert await shown.count(".answer.working") == 0
        assert "reloaded" in await shown.text(".facts")
        await shown.app.clean()
        engine.interval = 0.0
        await shown.page.click(".again")
        await shown.answered()
        assert await shown.text(".text") == "x" * 400


@pytest.mark.slow
async def test_text_and_batch_survive_too(playground, scripted):
    async with playground(scripted("abc")) as shown:
        await shown.page.click("[data-mode=text]")
        await shown.ask("begin")
        await shown.answered()
        await shown.page.click("[data-mode=batch]")
        await shown.page.fill("#prompt", "one\ntwo")
        await shown.page.click("#send")
        await shown.answered(3)
        await shown.reload()
        assert await shown.page.get_attribute("#tab-batch", "aria-selected") == "true"
        assert await shown.count("#answers-batch .answer") == 2
        assert await shown.text("#answers-batch .text") == "abc"
        assert await shown.page.locator("#answers-text .text").text_content() == "abc"


@pytest.mark.slow
async def test_clear_forgets(playground, scripted):
    async with playground(scripted("abc")) as shown:
        await shown.ask("a secret")
        await shown.answered()
        assert "a secret" in await shown.page.evaluate(STORED)
        await shown.page.click("#clear")
        assert await shown.count(".answer") == 0
        assert "a secret" not in await shown.page.evaluate(STORED)
        await shown.reload()
        assert await shown.count(".answer") == 0


@pytest.mark.slow
async def test_a_chat_is_its_tab_s_own(playground, scripted):
    async with playground(scripted("abc")) as shown:
        await shown.ask("a secret")
        await shown.answered()
        stored = json.loads(await shown.page.evaluate(STORED))
        assert stored["local"] == {}
        other = await shown.page.context.new_page()
        await other.goto(shown.app.url)
        assert await other.evaluate(STORED) == '{"local":{},"session":{}}'


@pytest.mark.slow
async def test_what_is_stored_is_limited(playground, scripted):
    async with playground(scripted("abc")) as shown:
        stored = await shown.page.evaluate(
            """async () => {
                const store = await import(new URL('playground/store.js', location.href).href);
                const answers = [...Array(40).keys()].map((i) => ({
                    asked: String(i), text: 'x'.repeat(100_000), working: false }));
                store.save({ views: { chat: { answers } } });
                const saved = JSON.parse(sessionStorage.getItem('octavo-playground'));
                return saved.views.chat.answers.map((answer) => answer.asked);
            }"""
        )
        assert stored == [str(i) for i in range(31, 40)]


@pytest.mark.parametrize(
    "stored",
    [*(pytest.param(text, marks=pytest.mark.slow) for text in ("null", "{")), '{"version": 1}'],
)
async def test_a_state_that_cannot_be_read_is_ignored(playground, scripted, stored):
    async with playground(scripted("abc")) as shown:
        await shown.page.add_init_script(
            f"sessionStorage.setItem('octavo-playground', {json.dumps(stored)})"
        )
        await shown.reload()
        await shown.ask()
        await shown.answered()
        assert await shown.text(".text") == "abc"
