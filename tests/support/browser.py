"""A real Chromium that records the requests and console errors of a page.

with chromium() as browser, open_page(browser, width=360) as view:
    view.page.goto(address)
    assert view.console_errors == []
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

PROGRAM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
PATIENCE = 60_000.0  # milliseconds; long enough for a busy machine

_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


SLOW = "was preloaded using link preload but not used within a few seconds"
"""A warning of Chromium on a busy machine."""


@dataclass
class OpenPage:
    """An open page.

    Args:
      requests: all requested addresses.
      console_errors: errors and warnings of the console, and uncaught exceptions.
    """

    page: Page
    requests: list[str] = field(default_factory=list)
    console_errors: list[str] = field(default_factory=list)

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true.

        Polls, because the page's content security policy forbids Playwright's
        `wait_for_function`."""
        began = time.monotonic()
        while not self.page.evaluate(expression):
            assert 1000 * (time.monotonic() - began) < PATIENCE, (
                f"timeout while waiting for {expression}"
            )
            self.page.wait_for_timeout(20)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def wait_until_drawn(self) -> None:
        """Wait until all charts of a run are drawn."""
        self.until(
            "[...document.querySelectorAll('.run')].every((run) => run.dataset.drawn) && "
            "document.querySelector('.words[data-round]') !== null"
        )

    @property
    def horizontal_overflow(self) -> int:
        """Pixels by which the page is wider than the screen."""
        overflow = self.page.evaluate(
            "document.documentElement.scrollWidth - window.innerWidth"
        )
        return int(overflow)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium; skip the test if it is not installed."""
    if PROGRAM is None:
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(
    browser: Browser, *, width: int = 1280, dark: bool = False, offline: bool = False
) -> Iterator[OpenPage]:
    """Open a page in a new browser context, without cookies or storage."""
    narrow = width < 500
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
        has_touch=narrow,
        is_mobile=narrow,
        offline=offline,
    )
    context.set_default_timeout(PATIENCE)
    look = OpenPage(context.new_page())
    look.page.on("request", lambda request: look.requests.append(request.url))
    look.page.on(
        "console",
        lambda message: (
            look.console_errors.append(message.text)
            if message.type in ("error", "warning") and SLOW not in message.text
            else None
        ),
    )
    look.page.on("pageerror", lambda error: look.console_errors.append(str(error)))
    try:
        yield look
    finally:
        context.close()
