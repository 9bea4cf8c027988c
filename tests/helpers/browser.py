"""A real Chromium, without a screen."""

from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

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
        complaints: errors of the console and of scripts, and dialogs.
        requests: what was fetched, but for the file itself.
    """

    def __init__(self, page, place):
        """Listen to `page` from now on; files are shown at a place."""
        self.page, self._place = page, place
        self.complaints = []
        self.requests = []
        self._listeners = {
            "console": self._heard,
            "pageerror": self._failed,
            "request": self._asked,
            "dialog": self._interrupted,
        }
        for event, listener in self._listeners.items():
            page.on(event, listener)

    def leave(self):
        """Listen no longer, and show nothing."""
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        self.page.mouse.move(0, 0)
        self.page.goto("about:blank")

    def _heard(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _failed(self, error):
        self.complaints.append(str(error))

    def _interrupted(self, dialog):
        self.complaints.append(dialog.message)
        dialog.dismiss()

    def _asked(self, request):
        if not request.url.startswith(("file:", "blob:", "data:")):
            self.requests.append(request.url)

    def open(self, file):
        """Open a file, and wait until its script says that it is ready."""
        copyfile(file, self._place)
        self.page.goto(self._place.as_uri())
        self.page.wait_for_selector("body[data-ready]", timeout=60_000)
        return self.page


def until(page, condition, arg=None):
    """Wait until a condition of a page holds, looked at before each frame; a minute at most.

    That of playwright evaluates text in the page, which the policy of a page forbids.
    """
    look = f"const look = () => (({condition})(arg) ? done() : requestAnimationFrame(look))"
    late = "setTimeout(() => fail(new Error('it does not come to hold')), 60000)"
    page.evaluate(f"(arg) => new Promise((done, fail) => {{ {look}; {late}; look(); }})", arg)


def drawn(page):
    """Wait until the panels of a trace's page show its clock and its choice as they are now.

    They are drawn before the next frame, so a selector can still find what they showed before.
    """
    until(page, "() => !kvcore.due")


class Browser:
    """A browser that is offline, with tabs that were used before.

    A script that a tab has seen at the same place is not compiled again, which takes three
    quarters of the time to open a page.

    Attributes:
        place: where all tabs find what they show.
    """

    def __init__(self, chromium, folder):
        """Open no tab yet."""
        self.place = Path(folder) / "page.html"
        self._context = chromium.new_context(offline=True)
        self._idle = []

    @contextmanager
    def page(self):
        """Return playwright's page of an empty tab; after a failure it is not used again."""
        page = self._idle.pop() if self._idle else self._context.new_page()
        try:
            yield page
        except BaseException:
            page.close()
            raise
        self._idle.append(page)


@contextmanager
def browsing():
    """Run a browser as long as the body takes; skip the test if there is none."""
    program = required("chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright, TemporaryDirectory() as folder:
        chromium = playwright.chromium.launch(executable_path=program, args=list(SWITCHES))
        try:
            yield Browser(chromium, folder)
        finally:
            chromium.close()


@contextmanager
def tab(browser, size=WIDE, *, scheme="light"):
    """Return an empty tab of a size, `light` or `dark`, for as long as the body takes."""
    width, height = size
    with browser.page() as page:
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(media="null", color_scheme=scheme)
        opened = Tab(page, browser.place)
        yield opened
        opened.leave()
