"""Pages in a real browser: Debian's Chromium, driven by Playwright."""

import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


@dataclass
class OpenedPage:
    """A page, and what happened in it since it was opened."""

    page: Any
    errors: list[str] = field(default_factory=list)
    """Errors and warnings of the console, and exceptions."""
    requests: list[str] = field(default_factory=list)
    """Addresses that the page asked for, apart from data in the page itself."""

    def text(self):
        """All text that a reader sees, once everything that opens by a click is open."""
        for summary in self.page.locator("summary").all():
            if summary.is_visible() and not summary.evaluate("each => each.parentElement.open"):
                summary.click()
        return self.page.inner_text("body")

    def accessibility_faults(self):
        """Serious and critical faults that axe-core finds: rule and element of each."""
        axe = pytest.importorskip("axe_core_python.sync_playwright", reason="axe-core-python is not installed")
        return [
            (fault["id"], node["html"][:200])
            for fault in axe.Axe().run(self.page, options={"resultTypes": ["violations"]})["violations"]
            if fault["impact"] in ("serious", "critical")
            for node in fault["nodes"]
        ]

    def column(self, table, number):
        """The texts of a column of a table, from top to bottom."""
        return self.page.locator(f"{table} tbody tr td:nth-child({number + 1})").all_inner_texts()


@contextmanager
def chromium():
    """A browser; the test is skipped where Playwright or Chromium is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright for Python is not installed")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser, file, *, width=1280, scheme="light", scripts=True, before=None):
    """An opened page.

    Args:
        browser: that of `chromium`.
        file: HTML file.
        width: of the window in pixels.
        scheme: `light` or `dark`.
        scripts: whether scripts are switched on.
        before: a script that runs before those of the page.
    """
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=scripts
    )
    try:
        if before:
            context.add_init_script(before)
        opened = OpenedPage(context.new_page())
        context.on("request", lambda request: opened.requests.append(request.url))
        context.route(
            "**/*", lambda route: route.continue_() if route.request.url.startswith("file:") else route.abort()
        )
        opened.page.on("pageerror", lambda error: opened.errors.append(str(error)))
        opened.page.on(
            "console",
            lambda message: opened.errors.append(message.text) if message.type in ("error", "warning") else None,
        )
        opened.page.goto(file.resolve().as_uri())
        yield opened
    finally:
        context.close()
