"""A real Chromium, without a screen."""

from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.programs import required

SWITCHES = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

WIDE, NARROW = (1280, 900), (390, 844)
"""A window of a laptop and of a phone, in CSS pixels."""


class Tab:
    """A page in the browser, and what went wrong in it.

    Attributes:
        page: playwright's.
        complaints: errors of the console and of scripts.
        requests: what was fetched, but for the file itself.
    """

    def __init__(self, page):
        """Listen to `page` from now on."""
        self.page = page
        self.complaints = []
        self.requests = []
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._asked)

    def _heard(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _asked(self, request):
        if not request.url.startswith(("file:", "blob:", "data:")):
            self.requests.append(request.url)

    def open(self, file):
        """Open a file, and wait until its script says that it is ready."""
        self.page.goto(Path(file).absolute().as_uri())
        self.page.wait_for_selector("body[data-ready]", timeout=60_000)
        return self.page


def until(page, condition, arg=None):
    """Wait until a condition of a page holds, looked at before each frame.

    That of playwright evaluates text in the page, which the policy of a page forbids.
    """
    look = f"const look = () => (({condition})(arg) ? done() : requestAnimationFrame(look))"
    page.evaluate(f"(arg) => new Promise((done) => {{ {look}; look(); }})", arg)


@contextmanager
def browsing():
    """Run a browser as long as the body takes; skip the test if there is none."""
    program = required("chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(SWITCHES))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def tab(browser, size=WIDE, *, scheme="light"):
    """Open an empty page of a size, `light` or `dark`, for as long as the body takes."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, offline=True
    )
    try:
        yield Tab(context.new_page())
    finally:
        context.close()
