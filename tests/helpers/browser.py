"""A headless Chromium for tests."""

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
    """A page in the browser, and the errors in it.

    Attributes:
        page: the page of playwright.
        complaints: errors of the console and of scripts, and dialogs.
        requests: URLs that were fetched from outside the page.
    """

    def __init__(self, page, place):
        """Record the events of `page` from now on; files are shown at `place`."""
        self.page, self._place = page, place
        self.complaints = []
        self.requests = []
        self._listeners = {
            "console": self._on_console,
            "pageerror": self._on_error,
            "request": self._on_request,
            "dialog": self._on_dialog,
        }
        for event, listener in self._listeners.items():
            page.on(event, listener)

    def leave(self):
        """Stop recording events, and show an empty page."""
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        self.page.mouse.move(0, 0)
        self.page.goto("about:blank")

    def _on_console(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _on_error(self, error):
        self.complaints.append(str(error))

    def _on_dialog(self, dialog):
        self.complaints.append(dialog.message)
        dialog.dismiss()

    def _on_request(self, request):
        if not request.url.startswith(("file:", "blob:", "data:")):
            self.requests.append(request.url)

    def open(self, file):
        """Open a file, and wait until its script has marked the page as ready."""
        copyfile(file, self._place)
        self.page.goto(self._place.as_uri())
        self.page.wait_for_selector("body[data-ready]", timeout=60_000)
        return self.page


def until(page, condition, arg=None):
    """Wait until a condition holds in a page, checked before each frame, for up to a minute.

    Playwright's own function evaluates text in the page, which the policy of a page forbids.
    """
    look = f"const look = () => (({condition})(arg) ? done() : requestAnimationFrame(look))"
    late = "setTimeout(() => fail(new Error('the condition does not hold')), 60000)"
    page.evaluate(f"(arg) => new Promise((done, fail) => {{ {look}; {late}; look(); }})", arg)


def drawn(page):
    """Wait until the panels of a trace's page show its current clock and selection.

    They are drawn before the next frame, so a selector can still find what they showed before.
    """
    until(page, "() => !kvcore.due")


class Browser:
    """A browser that is offline, with tabs that are reused.

    A script that a tab has seen at the same place is not compiled again, which takes three
    quarters of the time to open a page.

    Attributes:
        place: the file that all tabs show.
    """

    def __init__(self, chromium, folder):
        """Create a context without tabs."""
        self.place = Path(folder) / "page.html"
        self._chromium = chromium
        self._context = chromium.new_context(offline=True)
        self._idle = []

    @contextmanager
    def page(self):
        """Yield playwright's page of an empty tab, which is reused unless the body fails."""
        page = self._idle.pop() if self._idle else self._context.new_page()
        try:
            yield page
        except BaseException:
            page.close()
            raise
        self._idle.append(page)

    @contextmanager
    def visit(self, size=NARROW):
        """Yield a page that may load from servers, and the URLs that are loaded for it."""
        width, height = size
        context = self._chromium.new_context(viewport={"width": width, "height": height})
        loaded = []
        context.on("request", lambda request: loaded.append(request.url))
        try:
            yield context.new_page(), loaded
        finally:
            context.close()


@contextmanager
def browsing():
    """Yield a browser for as long as the body runs; skip the test if none is installed."""
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
    """Yield an empty tab of a size, `light` or `dark`, for as long as the body runs."""
    width, height = size
    with browser.page() as page:
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(media="null", color_scheme=scheme)
        opened = Tab(page, browser.place)
        yield opened
        opened.leave()
