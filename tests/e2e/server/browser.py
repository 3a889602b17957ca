"""A real Chromium, driven by Playwright, for the tests of the pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

PATIENCE_MS = 20_000
NONE = (
    "There is no Chromium on this machine, so the pages are not tested. Install it (`apt-get install chromium` on Debian, "
    "or `.venv/bin/playwright install chromium`), or name one in OCTAVO_CHROMIUM."
)
expect.set_options(timeout=PATIENCE_MS)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser. Without one the test is skipped, or fails where OCTAVO_NEED_BROWSER is set."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = os.environ.get("OCTAVO_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        if path is None and not os.path.exists(playwright.chromium.executable_path):  # noqa: PTH110
            if os.environ.get("OCTAVO_NEED_BROWSER"):
                pytest.fail(NONE)
            pytest.skip(NONE)
        # A container often has no user namespaces and a small /dev/shm; these pages are our own.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


class Tab:
    """A page in a context of its own, with what its console said."""

    def __init__(self, browser: Browser, url: str, **options: object) -> None:
        self.context = browser.new_context(base_url=url, **options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.errors: list[str] = []
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _note(self, message: object) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} {message.location}")

    def open(self, path: str) -> Page:
        self.page.goto(path)
        return self.page

    def check(self) -> None:
        """No errors on the console, nothing serious that axe finds, nothing wider than the window."""
        assert self.errors == [], self.errors
        found = Axe().run(self.page, options={"resultTypes": ["violations"]}).response["violations"]
        serious = [
            (one["id"], one["help"], [node["html"] for node in one["nodes"][:3]])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == [], serious
        wide = self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert wide <= 0, wide
