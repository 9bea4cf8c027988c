"""What README and docs show is what happens: their snippets run, their output is compared."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page, language):
    """Return the fenced blocks of `page` in `language`."""
    return [body for kind, body in FENCE.findall(page.read_text()) if kind == language]


def commands(page):
    """Return the (command, output) pairs of the console blocks of `page`."""
    found = []
    for body in blocks(page, "console"):
        for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def name(page):
    """Return what a test about `page` is called."""
    return str(page.relative_to(ROOT))


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
WITH_KVCORE = [page for page in PAGES if any(c.startswith("kvcore ") for c, _ in commands(page))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_snippets_run(page, tmp_path, monkeypatch):
    """The Python blocks of a page run one after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "__snippet__"}
    for number, body in enumerate(blocks(page, "python")):
        exec(compile(body, f"{name(page)}[{number}]", "exec", dont_inherit=True), space)  # noqa: S102


@pytest.mark.parametrize("page", WITH_KVCORE, ids=name)
def test_kvcore_commands_run(page, tmp_path):
    """The `kvcore` commands of a page succeed, and print what the page says they print."""
    (tmp_path / "my_requests.jsonl").write_bytes((ROOT / "tests/data/requests.jsonl").read_bytes())
    for command, output in commands(page):
        words = shlex.split(command)
        if words[0] != "kvcore":
            continue
        done = subprocess.run(
            [sys.executable, "-m", "kvcore", *words[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        printed = [line.rstrip() for line in done.stdout.splitlines()]
        shown = [line.rstrip() for line in output.splitlines() if line.strip()]
        for line in shown:
            assert line in printed or line == "...", f"{command} does not print {line!r}"
