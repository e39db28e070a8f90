"""A real browser, and what a page does in it: what it asks for, what it complains of.

with chromium() as browser, looking(browser, width=360) as look:
    look.page.goto(address)
    assert look.complaints == []
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
PATIENCE = 60_000.0  # milliseconds, for a machine that has much else to do

_ALONE = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@dataclass
class Look:
    """A page that is open.

    Args:
      requests: every address that was asked for.
      complaints: errors and warnings of the console, and errors that nobody caught.
    """

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def until(self, expression: str) -> None:
        """Until an expression of JavaScript is true.

        Asked from here again and again: a page that may not evaluate text cannot be told to
        wait for it."""
        began = time.monotonic()
        while not self.page.evaluate(expression):
            assert 1000 * (time.monotonic() - began) < PATIENCE, (
                f"it has not come to pass: {expression}"
            )
            self.page.wait_for_timeout(20)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def drawn(self) -> None:
        """Until all charts of a run are drawn."""
        self.until(
            "[...document.querySelectorAll('.run')].every((run) => run.dataset.drawn) && "
            "document.querySelector('.words[data-round]') !== null"
        )

    @property
    def wider_than_the_screen(self) -> int:
        found = self.page.evaluate(
            "document.documentElement.scrollWidth - window.innerWidth"
        )
        return int(found)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Starts one; skips the test where there is none."""
    if PROGRAM is None:
        pytest.skip("there is no Chromium here")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=_ALONE)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def looking(
    browser: Browser, *, width: int = 1280, dark: bool = False, offline: bool = False
) -> Iterator[Look]:
    """A page of its own, with nothing remembered."""
    narrow = width < 500
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
        has_touch=narrow,
        is_mobile=narrow,
        offline=offline,
    )
    context.set_default_timeout(PATIENCE)
    look = Look(context.new_page())
    look.page.on("request", lambda request: look.requests.append(request.url))
    look.page.on(
        "console",
        lambda message: (
            look.complaints.append(message.text)
            if message.type in ("error", "warning")
            else None
        ),
    )
    look.page.on("pageerror", lambda error: look.complaints.append(str(error)))
    try:
        yield look
    finally:
        context.close()
