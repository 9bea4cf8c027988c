"""Programs that tests start; as a program, it installs missing ones.

They are Debian's packages, and Python for browsers, from the npm registry.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PYODIDE = Path(
    os.environ.get("KVCORE_PYODIDE")
    or Path(__file__).parents[2] / ".tox" / "pyodide" / "node_modules" / "pyodide"
)
"""The folder with Python for browsers, and a wheel of msgspec for it."""

PROGRAMS = {
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "redis-server": ("redis-server", "valkey-server"),
}
"""The possible names of each program, by Debian's package."""


def find(package):
    """Return the path of a program; None if it is not installed."""
    return next(filter(None, map(shutil.which, PROGRAMS[package])), None)


def required(package):
    """Return the path of a program; skip the test if it is not installed."""
    return find(package) or pytest.skip(f"none of {', '.join(PROGRAMS[package])} is installed")


def install(package):
    """Install a package if that is needed and possible; return a text on the outcome."""
    if found := find(package):
        return f"there is {found}"
    if not shutil.which("apt-get") or os.geteuid():
        return "there is none: to install one takes apt-get and root"
    print(f"installing {package} from Debian's packages", flush=True)  # noqa: T201
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "timeout": 600}
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        for command in (
            ["apt-get", "update", "-qq"],
            ["apt-get", "install", "-qq", "-y", "--no-install-recommends", package],
        ):
            subprocess.run(command, env=environment, **quiet)  # noqa: PLW1510 - in `quiet`
    except (OSError, subprocess.SubprocessError) as error:
        return f"it cannot be installed: {error}"
    return f"installed {find(package)}"


def install_runtime():
    """Install Python for browsers if that is needed and possible; return a text on it."""
    from kvcore_judge.site import PYODIDE as RELEASE  # noqa: PLC0415 - tests do without
    from kvcore_judge.site import WHEEL  # noqa: PLC0415 - as above

    if any(PYODIDE.glob("msgspec-*.whl")):
        return f"there is {PYODIDE}"
    if not shutil.which("npm"):
        return "there is none: to install one takes npm"
    folder = PYODIDE.parents[1]
    folder.mkdir(parents=True, exist_ok=True)
    # One try, since it waits for minutes between several; without it the tests skip.
    npm = ["npm", "install", "--fetch-retries=0", "--no-audit", "--no-fund", "--ignore-scripts"]
    npm += ["--prefix", folder]
    pip = [sys.executable, "-m", "pip", *WHEEL.split()[1:], "-d", PYODIDE]
    try:
        for command in ([*npm, f"pyodide@{RELEASE}"], pip):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        return f"it cannot be installed: {error}"
    return f"installed {PYODIDE}"


if __name__ == "__main__":
    for name in PROGRAMS:
        print(f"{name}: {install(name)}", file=sys.stderr)  # noqa: T201
    print(f"pyodide: {install_runtime()}", file=sys.stderr)  # noqa: T201
