"""Tests that the snippets of README and docs run and print the output that is shown."""

from __future__ import annotations

import gzip
import re
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from helpers.commands import running

from kvcore_cli.main import run
from kvcore_plugins.workload.mooncake import Mooncake

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SNIPPET = re.compile(
    r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE
)
ASKED = re.compile(r"^\| .*\? \| `(kvcore .*?)` \|", re.MULTILINE)


def blocks(page, language):
    """Return the fenced blocks of `page` in `language`."""
    return [body for kind, body in FENCE.findall(page.read_text()) if kind == language]


def commands(page):
    """Return the (command of kvcore, output) pairs of `page`: of its console blocks.

    Those that README has in its table of questions come before, without output.
    """
    asked = ASKED.findall(page.read_text()) if page == ROOT / "README.md" else []
    found = [(command, "") for command in asked]
    for body in blocks(page, "console"):
        for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            # README's first command installs kvcore, which the tests already have.
            command = line.rpartition("&& .venv/bin/")[2]
            if command.startswith("kvcore "):
                found.append((command, output))
    return found


def needs_no_file(command):
    """Return True if `command` neither reads nor writes a file."""
    return not re.search(r"\.[a-z/]|--out |\bresults\b", command)


def printed_by(command, capsys):
    """Run `command` in this process; return its lines of stdout and stderr without spacing."""
    code = run(shlex.split(command)[1:])
    done = capsys.readouterr()
    assert code == 0, f"{command}\n{done.err}"
    return [
        [" ".join(line.split()) for line in text.splitlines()] for text in (done.out, done.err)
    ]


def assert_shown(output, printed, command):
    """Check that stdout or stderr has the lines of `output` in order; `...` marks a gap."""
    left = [[*lines, ""] for lines in printed]
    for line in output.splitlines():
        words = " ".join(line.split())
        if words != "...":
            found = next((lines for lines in left if words in lines), None)
            assert found is not None, f"{command} does not print {line!r} there"
            del found[: found.index(words) + 1]


def name(page):
    """Return the id of a test of `page`."""
    return str(page.relative_to(ROOT))


KV_EVENTS, SERVE = ROOT / "docs/how-to/kv-events.md", ROOT / "docs/how-to/serve.md"
WITH_TESTS_OF_THEIR_OWN = {
    ROOT / "docs/how-to/write-a-plugin.md",
    ROOT / "docs/how-to/see-why-a-policy-loses.md",
}
WITH_PYTHON = [
    page
    for page in PAGES
    # The Python of SERVE writes the traces that its commands read: both run in one test.
    if blocks(page, "python") and page not in {*WITH_TESTS_OF_THEIR_OWN, SERVE}
]
WITH_FILES = [
    page
    for page in PAGES
    if page not in WITH_TESTS_OF_THEIR_OWN
    and not all(needs_no_file(c) for c, _ in commands(page))
]
SHOWN: dict[str, list[tuple[str, str]]] = {}
"""Commands that need no file, with the pages that show them and the output shown there."""
for shown_on in PAGES:
    for line, result in commands(shown_on):
        if needs_no_file(line):
            SHOWN.setdefault(line, []).append((name(shown_on), result))


def shorten_the_trace(monkeypatch, words):
    """Read the begin of the bundled trace, for commands whose output no page shows.

    A leaderboard takes 2,000 requests, and keeps them for others of the process.
    """
    whole, limit = Mooncake.__iter__, 2000 if "leaderboard" in words else 100
    monkeypatch.setattr(Mooncake, "__iter__", lambda trace: islice(whole(trace), limit))


def record_stand_in(folder):
    """Record `events.jsonl.gz` from the example that imitates a server."""
    example = [sys.executable, ROOT / "examples/full_reports.py", "my_requests.jsonl"]
    with running([*example, "tcp://127.0.0.1:*"], cwd=folder) as server:
        address = server.stdout.readline().split()[-1]
        record = [sys.executable, "-m", "kvcore", "record", "--zmq", address, "-o"]
        subprocess.run(
            [*record, "events.jsonl.gz", "--batches", "200"],
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=60,
        )
    assert server.returncode == 0


def run_python(page, capsys):
    """Run the Python blocks of a page in order and compare what they print.

    The expected output of a block is the text block right below it, if there is one.
    """
    space = {"__name__": "__snippet__"}
    for index, (body, shown) in enumerate(SNIPPET.findall(page.read_text())):
        exec(compile(body, f"{name(page)}[{index}]", "exec", dont_inherit=True), space)  # noqa: S102
        printed = capsys.readouterr().out
        assert not shown or printed == shown


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_snippets_run(page, tmp_path, monkeypatch, capsys):
    """The Python blocks of a page run and print the output that is shown."""
    monkeypatch.chdir(tmp_path)
    run_python(page, capsys)


@pytest.mark.parametrize("command", SHOWN)
def test_commands_without_files_run(command, tmp_path, monkeypatch, capsys):
    """A command that needs no file succeeds and prints the output that each page shows."""
    monkeypatch.chdir(tmp_path)
    if not any(output.strip() for _, output in SHOWN[command]):
        shorten_the_trace(monkeypatch, command)
    printed = printed_by(command, capsys)
    for page, output in SHOWN[command]:
        assert_shown(output, printed, f"{page}: {command}")


@pytest.mark.parametrize("page", WITH_FILES, ids=name)
def test_commands_with_files_run(page, tmp_path, monkeypatch, capsys):
    """The commands of a page that read or write files succeed in order, as shown."""
    monkeypatch.chdir(tmp_path)
    with gzip.open(ROOT / "kvcore/data/mooncake_conversation.jsonl.gz") as trace:
        (tmp_path / "my_requests.jsonl").write_bytes(b"".join(islice(trace, 200)))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if page == KV_EVENTS:
        record_stand_in(tmp_path)
    if page == SERVE:
        run_python(page, capsys)
    with_files = [pair for pair in commands(page) if not needs_no_file(pair[0])]
    if not any(output.strip() for _, output in with_files):
        shorten_the_trace(monkeypatch, str(with_files))
    for command, output in with_files:
        assert_shown(output, printed_by(command, capsys), command)
