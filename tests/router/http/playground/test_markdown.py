"""Answers in Markdown: their rendering, and that they are harmless."""

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

HARMLESS = {
    "aria-label", "checked", "class", "data-align", "data-label", "disabled", "href", "rel", "role",
    "start", "tabindex", "target", "title", "type",
}  # fmt: skip
TAGS = {
    "A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DIV", "EM", "H3", "H4", "H5", "H6", "HR",
    "INPUT", "LI", "OL", "P", "PRE", "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR",
    "UL",
}  # fmt: skip
INVENTORY = """() => [...document.querySelectorAll('.answer .text *')].map((element) => ({
    tag: element.tagName,
    attributes: element.getAttributeNames(),
    href: element.href ?? '',
    rel: element.rel ?? '',
}))"""
ATTACKS = (
    "<script>alert(1)</script>",
    "<ScRiPt src=//evil.example/x.js></sCrIpT>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)><a xlink:href=javascript:alert(1)>x",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "<style>@import '//evil.example/x.css'</style><link rel=prefetch href=//evil.example>",
    "<form action=//evil.example><input autofocus onfocus=alert(1)></form>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](java\tscript:alert(1))",
    "[d](&#106;avascript:alert(1)) [e](javascript&colon;alert(1)) [f](\x01javascript:alert(1))",
    "[g](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==) <javascript:alert(1)>",
    "[h](vbscript:x) [i](file:///etc/passwd) [j](//evil.example) [k](/status) [l](blob:x)",
    "[r]\n\n[r]: javascript:alert(1) 'title'",
    "![i](https://evil.example/pixel.png) ![j](javascript:alert(1)) ![k](/status)",
    "[![nested](https://evil.example/p.png)](javascript:alert(1))",
    "**<b onclick=alert(1)>** *_<img src=x onerror=alert(1)>_* ~~<script>~~",
    "> - > <img src=x onerror=alert(1)>\n>   - [x](javascript:alert(1))",
    "| <img src=x onerror=alert(1)> | [x](javascript:alert(1)) |\n|-|-|\n| <script> | `</td>` |",
    "```html\n</code></pre><img src=x onerror=alert(1)>\n```",
    '```"><img/src=x/onerror=alert(1)>\ncode\n```',
    "`</code><script>alert(1)</script>`",
    '[x](https://a.example/"onmouseover="alert(1)) <https://a.example/"onclick="alert(1)>',
    '[x](https://a.example "x\\" onmouseover=\\"alert(1)")',
    "&lt;script&gt;alert(1)&lt;/script&gt; &constructor; &#0; &#x110000;",
    "__proto__ [__proto__] [constructor](https://a.example)\n\n[__proto__]: https://a.example",
)


async def test_markdown_is_shown(playground, roomy):
    text = (
        "# Title\n\nSome **bold**, *slanted*, ~~struck~~ and `co<de`.\nA second line.\n\n"
        "3. three\n4. four\n   - inner\n\n- [x] done\n\n"
        "| a | b |\n|:-:|--:|\n| 1 | **2**<br>3 |\n\n> quoted &amp; told\n\n---\n\n"
        "```python\nx = 1\n```\n\n[link](https://a.example/b) and https://c.example.\n\n"
        "![picture](https://d.example/p.png)"
    )
    async with playground(roomy(text)) as shown:
        await shown.ask()
        await shown.answered()
        assert await shown.text(".text h3") == "Title"
        assert (
            await shown.text(".text p") == "Some bold, slanted, struck and co<de.\nA second line."
        )
        assert await shown.page.locator(".text ol").get_attribute("start") == "3"
        assert await shown.text(".text ol li:nth-child(2) ul li") == "inner"
        assert await shown.count(".text li.task input:checked:disabled") == 1
        assert await shown.text(".text td:nth-child(2)") == "2\n3"
        assert await shown.text(".text td:nth-child(2) strong") == "2"
        assert await shown.page.locator(".text th").nth(1).get_attribute("data-align") == "right"
        assert await shown.text(".text blockquote") == "quoted & told"
        assert await shown.count(".text hr") == 1
        assert await shown.text(".text .code-bar span") == "python"
        assert await shown.text(".text pre") == "x = 1"
        links = await shown.page.locator(".text a").all()
        hrefs = [await link.get_attribute("href") for link in links]
        assert hrefs == ["https://a.example/b", "https://c.example/", "https://d.example/p.png"]
        assert await links[2].inner_text() == "picture"
        for link in links:
            assert await link.get_attribute("rel") == "noopener noreferrer"


async def test_no_answer_is_run_or_fetches(playground, roomy):
    """Not even when cut after any character, as in a stream, nor after a reload."""
    text = "\n\n".join(ATTACKS)
    async with playground(roomy(text)) as shown:
        await shown.ask(text)
        await shown.answered()
        await check_inventory(shown)
        await shown.reload()
        await check_inventory(shown)
        for attack in ATTACKS:
            await shown.page.evaluate(SHOW_PREFIXES, attack)
            await check_inventory(shown)
        await shown.page.wait_for_timeout(200)  # loads would have started by now


SHOW_PREFIXES = """async (text) => {
    const { MarkdownView } = await import(new URL('playground/markdown.js', location.href).href);
    const box = document.querySelector('.answer .text');
    box.replaceChildren();
    const view = new MarkdownView(box);
    for (let end = 1; end <= text.length; end += 1) view.show(text.slice(0, end), false);
    view.show(text, true);
}"""


async def check_inventory(shown) -> None:
    inventory = await shown.page.evaluate(INVENTORY)
    assert inventory
    for element in inventory:
        assert element["tag"] in TAGS, element
        assert set(element["attributes"]) <= HARMLESS, element
        if element["tag"] == "A":
            assert element["href"].startswith(("https://", "http://")), element
            assert element["rel"] == "noopener noreferrer"


async def test_the_policy_stops_what_the_code_would_let_through(playground, scripted, get):
    async with playground(scripted("a")) as shown:
        refused = await shown.page.evaluate(
            """() => {
                try { document.body.insertAdjacentHTML('beforeend', '<b>x</b>'); return ''; }
                catch (error) { return error.message; }
            }"""
        )
        assert "TrustedHTML" in refused
        blocked = await shown.page.evaluate(
            """() => new Promise((resolve) => {
                document.addEventListener('securitypolicyviolation', (event) =>
                    resolve(event.effectiveDirective));
                document.body.append(Object.assign(new Image(), { src: 'http://127.0.0.2/x.png' }));
            })"""
        )
        assert blocked == "img-src"
        headers = (await get(shown.app.url)).headers
        assert headers["x-dns-prefetch-control"] == "off"
        shown.troubles.clear()  # the browser's reports of both


GROW = """async () => {
    const at = (name) => new URL(`playground/${name}`, location.href).href;
    const { Lexer } = await import(at('vendor/marked/marked.esm.js'));
    const { MarkdownView } = await import(at('markdown.js'));
    const lex = Lexer.prototype.lex;
    let read = 0;
    Lexer.prototype.lex = function (text) { read += text.length; return lex.call(this, text); };
    const box = document.createElement('div');
    const view = new MarkdownView(box);
    const paragraphs = 'A **paragraph** of `text`.\\n\\n'.repeat(500);
    for (let end = 4; end <= paragraphs.length; end += 4)
        view.show(paragraphs.slice(0, end), false);
    const readOfParagraphs = read;
    const first = box.firstElementChild;
    view.show(paragraphs + '```\\ncode', false);
    const code = box.lastElementChild;
    view.show(paragraphs + '```\\ncode\\nmore', false);
    view.show(paragraphs + '```\\ncode\\nmore\\n```\\n', true);
    return {
        length: paragraphs.length,
        read: readOfParagraphs,
        blocks: box.childElementCount,
        kept: first === box.firstElementChild && code === box.lastElementChild,
        code: code.querySelector('code').textContent,
    };
}"""


@pytest.mark.slow
async def test_complete_blocks_are_neither_read_nor_drawn_again(playground, scripted):
    """A token at the end of a long answer costs no more than at its beginning."""
    async with playground(scripted("a")) as shown:
        result = await shown.page.evaluate(GROW)
    assert result["read"] < 20 * result["length"]
    assert (result["blocks"], result["kept"]) == (501, True)
    assert result["code"] == "code\nmore"


async def test_streaming_draws_once_a_frame(playground, roomy):
    text = "word " * 800  # 4,000 tokens
    async with playground(roomy(text)) as shown:
        await shown.page.evaluate(
            """() => {
                window.frames_ = 0;
                const count = () => { window.frames_ += 1; requestAnimationFrame(count); };
                requestAnimationFrame(count);
                window.draws_ = 0;
                const facts = new MutationObserver(() => (window.draws_ += 1));
                facts.observe(document.querySelector('#summary'), { childList: true });
            }"""
        )
        await shown.ask()
        await shown.answered()
        assert (await shown.text(".text")).split() == ["word"] * 800
        draws, frames = await shown.page.evaluate("[window.draws_, window.frames_]")
        assert 0 < draws <= frames + 2


@pytest.mark.slow
async def test_nesting_too_deep_for_the_lexer_is_shown_as_text(playground, roomy):
    text = "before\n\n" + ">" * 6000 + " deep"
    async with playground(roomy(text)) as shown:
        await shown.ask()
        await shown.answered()
        assert "deep" in await shown.text(".text")


@pytest.mark.slow
async def test_links_may_be_defined_later(playground, scripted):
    async with playground(scripted("[a] first\n\nthen\n\n[a]: https://a.example/x")) as shown:
        await shown.ask()
        await shown.answered()
        assert await shown.page.locator(".text a").get_attribute("href") == "https://a.example/x"


@pytest.mark.parametrize("secure", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_code_and_answers_are_copied(playground, scripted, secure):
    """Without TLS, browsers offer no clipboard API beyond localhost."""
    async with playground(scripted("See:\n\n```\na < b\n\tc\n```")) as shown:
        if not secure:
            await shown.page.evaluate(
                "Object.defineProperty(navigator, 'clipboard', {value: null})"
            )
        await shown.ask()
        await shown.answered()
        read = await shown.page.context.new_page()
        for button, expected in (
            (".code-bar button", "a < b\n\tc"),
            (".actions .copy", "See:\n\n```\na < b\n\tc\n```"),
        ):
            await shown.page.bring_to_front()
            await shown.page.click(button)
            await shown.until_text(button, "Copied")
            await read.goto(shown.app.url)
            await read.bring_to_front()
            assert await read.evaluate("navigator.clipboard.readText()") == expected
