"""The playground in a real browser, with a real router and scripted engines."""

import time
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from tests import chromium

SECONDS = 30.0
"""Generous timeout: CI's machines may be busy."""
FAILED = "Failed to load resource"
"""Console message for every error response; those are not troubles."""


class Playground:
    """A page, and its problems.

    Attributes:
        page: The page.
        app: The router that serves it.
        troubles: Errors of its scripts, and requests to servers other than its router.
    """

    def __init__(self, page, app) -> None:
        self.page, self.app = page, app
        self.troubles: list[str] = []
        page.set_default_timeout(SECONDS * 1000)
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("console", self._note_message)
        page.on("request", self._note_request)
        page.on("dialog", lambda dialog: self.troubles.append(dialog.message))

    async def open(self) -> None:
        await self.page.goto(self.app.url)
        await self.page.wait_for_selector("#model option", state="attached")

    async def ask(self, text: str = "hi") -> None:
        await self.page.fill("#prompt", text)
        await self.page.press("#prompt", "Enter")

    async def enter(self, name: str, value: str) -> None:
        """Type `value` into a setting, which may be folded away."""
        await self.page.locator(f"#{name}").evaluate(
            """(field, value) => {
                field.value = value;
                field.dispatchEvent(new Event("input", { bubbles: true }));
            }""",
            value,
        )

    async def answered(self, count: int = 1) -> None:
        """Wait until `count` answers are complete."""

        async def complete() -> bool:
            working = await self.page.locator(".answer.working").count()
            return not working and await self.page.locator(".answer").count() == count

        await self.until(complete)

    async def reload(self) -> None:
        await self.page.reload()
        await self.page.wait_for_selector("#model option", state="attached")

    async def text(self, selector: str) -> str:
        return await self.page.locator(selector).first.inner_text()

    async def count(self, selector: str) -> int:
        return await self.page.locator(selector).count()

    async def until(self, condition) -> None:
        """Poll here: the page's policy forbids foreign scripts."""
        deadline = time.monotonic() + SECONDS
        while not await condition():
            assert time.monotonic() < deadline, await self.page.inner_text("body")
            await self.page.wait_for_timeout(20)

    async def until_text(self, selector: str, part: str) -> None:
        async def there() -> bool:
            return any(part in one for one in await self.page.locator(selector).all_inner_texts())

        await self.until(there)

    def _note_message(self, message) -> None:
        if message.type in {"error", "warning"} and FAILED not in message.text:
            self.troubles.append(message.text)

    def _note_request(self, request) -> None:
        if not request.url.startswith(self.app.url):
            self.troubles.append(request.url)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser():
    playwright = pytest.importorskip(
        "playwright.async_api", reason="needs playwright: pip install 'octavo[browser]'"
    )
    async with playwright.async_playwright() as driver:
        path = chromium.find(driver.chromium.executable_path)
        browser = await driver.chromium.launch(executable_path=path, args=chromium.ARGUMENTS)
        yield browser
        await browser.close()


@pytest.fixture
def playground(frontend, browser):
    """Open the page of a router with `engines`; fail if the page had troubles."""

    @asynccontextmanager
    async def open_playground(*engines, look=(), ready=True, **settings):
        async with frontend(*engines, **settings) as (app, _):
            context = await browser.new_context(**dict(look))
            await context.grant_permissions(["clipboard-read", "clipboard-write"], origin=app.url)
            shown = Playground(await context.new_page(), app)
            await (shown.open() if ready else shown.page.goto(app.url))
            yield shown
            await context.close()
            assert shown.troubles == []

    return open_playground


@pytest.fixture
def roomy(scripted):
    """Creates scripted engines with room for long answers."""

    def make(text: str, **options):
        engine = scripted(text, max_model_len=1 << 16, **options)
        engine.info.load.total_blocks = engine.info.load.free_blocks = 1 << 13
        return engine

    return make
