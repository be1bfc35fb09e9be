"""Tool calls, reasoning and schemas in the page; the engine's text is scripted."""

import json

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "<b>Rome</b>"}}\n</tool_call>'
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "think"}
TOOL = {"name": "weather", "parameters": {"type": "object"}}


@pytest.fixture
def talking(scripted):
    return lambda text: scripted(text, eos=True, max_model_len=4096, features={"constraints": True})


async def set_field(shown, field: str, text: str) -> None:
    if not await shown.page.is_visible(f"#{field}"):
        await shown.page.click("#settings summary")
    await shown.page.fill(f"#{field}", text)
    await shown.page.press(f"#{field}", "Tab")


async def test_a_call_is_shown_and_gone_on_from(playground, talking):
    engine = talking("<think>hm <i>so</i></think>" + CALL)
    async with playground(engine, **PARSERS) as shown:
        page = shown.page
        await set_field(shown, "tools", json.dumps(TOOL))
        await page.select_option("#tool_choice", "function weather")
        await shown.ask("Rome?")
        await shown.answered()
        assert engine.submits[0].HasField("constraint"), "the call was forced"
        assert await page.get_attribute(".reasoning", "open") is None, "it is folded"
        await page.click(".reasoning summary")
        assert await shown.text(".reasoning p") == "hm <i>so</i>"
        assert await shown.text(".call .name") == "weather"
        assert await shown.text(".call .arguments") == '{\n  "city": "<b>Rome</b>"\n}'
        assert await shown.count(".answer :is(b:not(.name), i)") == 0
        assert "calls tools" in await shown.text(".facts")
        await shown.reload()
        engine.script = talking("22 degrees").script
        await page.fill(".result textarea", "sunny, 22")
        await page.click(".send-results")
        await shown.answered(2)
        assert await shown.text(".answer:nth-of-type(2) .asked") == "weather: sunny, 22"
        assert await shown.text(".answer:nth-of-type(2) .text") == "22 degrees"
        assert not engine.submits[1].HasField("constraint"), "it need not call once more"
        assert not await page.is_visible(".send-results")


@pytest.mark.slow
async def test_an_answer_by_a_schema_is_no_markdown(playground, talking):
    engine = talking('{"a": "*b*"}')
    async with playground(engine) as shown:
        await set_field(shown, "schema", '{"type": "object"}')
        assert "JSON Schema" in await shown.text("#settings-summary")
        await shown.ask()
        await shown.answered()
        assert await shown.text(".text") == '{"a": "*b*"}'
        await shown.page.click("[data-mode=batch]")
        await shown.page.fill("#prompt", "one\ntwo")
        await shown.page.click("#send")
        await shown.answered(3)
    assert {submit.constraint.json_schema for submit in engine.submits} == {'{"type": "object"}'}


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("schema", "{", "This is not JSON"),
        ("schema", "[]", "A JSON Schema is an object."),
        ("tools", '[{"nam": "x"}]', "Tool 1 needs a name"),
    ],
)
async def test_what_is_wrong_is_said_in_place(playground, talking, field, text, message):
    engine = talking("a")
    async with playground(engine) as shown:
        await set_field(shown, field, text)
        assert message in await shown.text(f"#{field}-wrong")
        await shown.page.fill("#prompt", "hi")
        await shown.page.click("#send")
        assert await shown.page.get_attribute(f"#{field}", "aria-invalid") == "true"
        assert await shown.count(".answer") == 0
        await shown.page.fill(f"#{field}", "")
        await shown.ask()
        await shown.answered()
        assert await shown.page.get_attribute(f"#{field}", "aria-invalid") is None


@pytest.mark.slow
async def test_what_the_server_refuses_is_said_in_place(playground, talking):
    async with playground(talking("a")) as shown:
        await set_field(shown, "tools", '[{"name": "a b"}]')
        await shown.ask()
        await shown.answered()
        assert "letters, digits" in await shown.text("#tools-wrong")
        assert "letters, digits" in await shown.text(".problem .message")
