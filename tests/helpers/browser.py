"""A real Chromium, without a screen; as a program: installs one where there is none."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")

SWITCHES = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

WIDE, NARROW = (1280, 900), (390, 844)
"""A window of a laptop and of a phone, in CSS pixels."""


def program():
    """Return the path of a browser; None if there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def install():
    """Install Debian's package if that is needed and possible; say what was done."""
    found = program()
    if found:
        return f"there is {found}"
    if not shutil.which("apt-get") or os.geteuid():
        return f"there is none of {', '.join(PROGRAMS)}: to install one takes apt-get and root"
    print("installing chromium from Debian's packages", flush=True)  # noqa: T201
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "timeout": 600}
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        for command in (
            ["apt-get", "update", "-qq"],
            ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "chromium"],
        ):
            subprocess.run(command, env=environment, **quiet)  # noqa: PLW1510 - in `quiet`
    except (OSError, subprocess.SubprocessError) as error:
        return f"it cannot be installed: {error}"
    return f"installed {program()}"


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


@contextmanager
def browsing():
    """Run a browser as long as the body takes; skip the test if there is none."""
    if program() is None:
        pytest.skip(f"none of {', '.join(PROGRAMS)} is installed")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), args=list(SWITCHES))
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


if __name__ == "__main__":
    print(f"{Path(__file__).name}: {install()}", file=sys.stderr)  # noqa: T201
