"""The page at every size, by keyboard, and for screen readers."""

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

WIDE = (
    "# A heading-that-is-one-very-long-word-" + "x" * 80 + "\n\n"
    "| a | b | c | d |\n|-|-|-|-|\n| " + " | ".join(["unbreakable" * 3] * 4) + " |\n\n"
    "```\n" + "long line of code " * 20 + "\n```\n\nhttps://a.example/" + "path" * 40 + "\n"
)
CUT_OFF = """() => [...document.querySelectorAll('header *, main *, aside *')]
    .filter((element) => element.checkVisibility()
        && !element.closest('pre, .wide, .unseen, svg, canvas, #prompt-label, option'))
    .map((element) => [element.getBoundingClientRect(), element.tagName + '.' + element.className])
    .filter(([box]) => box.width && (box.right > innerWidth + 0.5 || box.left < -0.5))
    .map(([, name]) => name)"""
CONTRASTS = """() => {
    const channels = (color) => color.match(/[\\d.]+/g).map(Number);
    const luminance = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map((value) => value / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const behind = (element) => {
        const color = channels(getComputedStyle(element).backgroundColor);
        return color[3] === 0 ? behind(element.parentElement) : color;
    };
    const texts = [...document.querySelectorAll('body *')].filter((element) =>
        element.checkVisibility() && !element.matches(':disabled, option, template')
        && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
    return texts.map((element) => {
        const [light, dark] = [channels(getComputedStyle(element).color), behind(element)]
            .map(luminance).sort((a, b) => b - a);
        return [(light + 0.05) / (dark + 0.05), element.textContent.trim().slice(0, 40)];
    });
}"""


async def check_fits(shown, width: int) -> None:
    page = shown.page
    assert await page.evaluate("document.scrollingElement.scrollWidth") <= width
    assert await page.evaluate("document.scrollingElement.scrollHeight <= innerHeight")
    assert await page.evaluate(CUT_OFF) == []


@pytest.mark.parametrize(
    "width", [320, *(pytest.param(width, marks=pytest.mark.slow) for width in (375, 768, 1440))]
)
async def test_nothing_is_cut_off(playground, roomy, width):
    look = {"viewport": {"width": width, "height": 720}}
    async with playground(roomy(WIDE), look=look) as shown:
        page = shown.page
        await check_fits(shown, width)
        await shown.ask("word" * 60)
        await shown.answered()
        await check_fits(shown, width)
        await page.click("#settings summary")
        await check_fits(shown, width)
        for field in ("#prompt", "#system", "#temperature", "#stop", "#send", "#clear"):
            await page.locator(field).scroll_into_view_if_needed()
            box = await page.locator(field).bounding_box()
            assert box["x"] >= 0, field
            assert box["x"] + box["width"] <= width, field
        await page.click("#settings summary")
        for mode in ("batch", "text"):
            await page.click(f"[data-mode={mode}]")
            await page.fill("#prompt", "one\ntwo")
            await page.click("#send")
            await page.wait_for_selector("#cancel", state="hidden")
            await check_fits(shown, width)
        assert await page.is_visible("#engines-button") == (width < 900)
        if width < 900:
            await page.click("#engines-button")
            assert not await page.is_visible("main")
        assert await page.is_visible(".engine .blocks")
        await check_fits(shown, width)


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
async def test_text_can_be_read(playground, scripted, scheme):
    look = {"color_scheme": scheme, "reduced_motion": "reduce"}
    text = (
        "# a\n\nb `c` [d](https://e.example)\n\n> f\n\n```py\ng\n```\n\n| h | i |\n|-|-|\n| j | k |"
    )
    async with playground(scripted(text), look=look) as shown:
        await shown.ask()
        await shown.answered()
        await shown.page.click("#settings summary")
        contrasts = await shown.page.evaluate(CONTRASTS)
        assert len(contrasts) > 40
        assert [(ratio, what) for ratio, what in contrasts if ratio < 4.5] == []


@pytest.mark.slow
async def test_motion_is_left_out_where_it_is_not_wanted(playground, scripted):
    async with playground(scripted(interval=None), look={"reduced_motion": "reduce"}) as shown:
        await shown.ask()
        running = "document.getAnimations().length"
        await shown.page.wait_for_selector(".answer.working")
        assert await shown.page.evaluate(running) == 0
        await shown.page.emulate_media(reduced_motion="no-preference")
        assert await shown.page.evaluate(running) == 1
        await shown.page.keyboard.press("Escape")
        await shown.answered()


async def test_the_keyboard_is_enough(playground, scripted):
    engine = scripted("x" * 400, interval=0.01)
    async with playground(engine) as shown:
        page = shown.page
        focused = "document.activeElement.id"
        assert await page.evaluate(focused) == "prompt"
        await page.keyboard.type("one")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("two")
        assert await shown.count(".answer") == 0
        await page.keyboard.press("Enter")
        await shown.until_text(".text", "xxx")
        assert await shown.text(".asked") == "one\ntwo"
        assert await page.get_attribute(".answer", "aria-busy") == "true"
        await page.keyboard.press("Escape")
        await shown.answered()
        assert "stopped" in await shown.text(".facts")
        assert await page.get_attribute(".answer", "aria-busy") == "false"
        await shown.app.until(lambda: engine.aborts)
        assert await page.evaluate(focused) == "prompt"
        await page.keyboard.type("three")
        await page.focus("#send")
        await page.keyboard.press("Enter")
        assert await page.evaluate(focused) == "cancel", "the focus stays on the button that acts"
        await page.keyboard.press("Enter")
        await shown.answered(2)
        assert await page.evaluate(focused) == "send"
        await page.focus("#tab-chat")
        await page.keyboard.press("ArrowRight")
        assert await page.evaluate(focused) == "tab-text"
        assert await page.is_visible("#answers-text")
        await page.keyboard.press("ArrowLeft")
        await page.keyboard.press("ArrowLeft")
        assert await page.evaluate(focused) == "tab-batch"


async def test_screen_readers_are_told(playground, scripted):
    async with playground(scripted("abc")) as shown:
        page = shown.page
        assert (
            await page.get_by_role("tabpanel", name="Chat").get_attribute("aria-live") == "polite"
        )
        assert await page.get_by_role("textbox", name="Message").is_visible()
        await shown.ask()
        await shown.answered()
        assert await page.get_by_role("button", name="Copy the answer").is_visible()
        await page.route("**/v1/chat/completions", lambda route: route.abort())
        await shown.ask()
        await page.get_by_role("alert").wait_for()


@pytest.mark.slow
async def test_an_example_is_asked_by_a_click(playground, scripted):
    async with playground(scripted("abc")) as shown:
        await shown.page.click(".example >> nth=0")
        await shown.answered()
        assert await shown.text(".asked") == "Why is the sky blue?"
        assert not await shown.page.is_visible(".welcome")


@pytest.mark.slow
async def test_several_engines_are_told_apart(playground, scripted):
    first = scripted("abc", model="tiny", device="cpu")
    second = scripted("abc", model="other", device="cuda")
    async with playground(
        first, second, look={"viewport": {"width": 1440, "height": 900}}
    ) as shown:
        await shown.until_text("#engines .engine:nth-child(2) .name", "Engine 2")
        devices = await shown.page.locator("#engines .device").all_inner_texts()
        assert sorted(devices) == ["other on cuda,", "tiny on cpu,"]
        await shown.page.select_option("#model", "tiny")
        await shown.reload()
        assert await shown.page.input_value("#model") == "tiny"
        await check_fits(shown, 1440)
        await second.kill()
        await shown.until_text("#engines .engine:only-child .name", "KV cache")
        assert await shown.page.input_value("#model") == "tiny"
        assert await shown.text("#engines .name") == "KV cache"


@pytest.mark.slow
async def test_a_model_s_own_defaults_are_shown(playground, scripted):
    """But a user's choice stays."""
    own = {"temperature": 0.5, "top_p": 0.75}
    first = scripted("abc", model="a", default_sampling=own)
    async with playground(first, scripted("abc", model="b")) as shown:
        await shown.until_text("#settings-summary", "temperature 0.5 · top p 0.75 · max tokens 200")
        await shown.page.click("#settings summary")
        await shown.page.fill("#temperature", "0.25")
        await shown.page.select_option("#model", "b")
        await shown.until_text("#settings-summary", "temperature 0.25 · top p 1 · max tokens 200")
        await shown.page.select_option("#model", "a")
        await shown.reload()
        await shown.until_text("#settings-summary", "temperature 0.25 · top p 0.75 ·")
