"""Tests that verbs read the folder that `--out` wrote as the trace in it."""

from __future__ import annotations

import pytest
from helpers.commands import run_here

SMALL = "zipf:requests=20,prefixes=4,prefix_tokens=64", "--blocks", "100", "--no-search"

READERS = (
    ("explain", "SOURCE", "3"),
    ("explain", "SOURCE", "--summary"),
    ("replay", "SOURCE"),
    ("whatif", "SOURCE", "--eviction", "fifo"),
    ("export", "SOURCE", "--to", "mooncake", "--out", "requests.jsonl"),
    ("watch", "SOURCE", "--speed", "inf"),
    ("view", "SOURCE", "-o", "page.html"),
    ("view", "SOURCE", "SOURCE", "-o", "pages.html"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the results of a run in `out`."""
    folder = tmp_path_factory.mktemp("results")
    assert run_here("simulate", *SMALL, "--out", "out", cwd=folder).returncode == 0
    return folder


@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_a_folder_is_read_as_its_trace(words, folder, tmp_path):
    """A verb prints and writes the same for the folder of a run as for the trace in it."""
    found = []
    for name, source in ("a", folder / "out"), ("b", folder / "out" / "trace.jsonl.gz"):
        place = tmp_path / name
        place.mkdir()
        given = [source if word == "SOURCE" else word for word in words]
        done = run_here(*given, cwd=place)
        assert done.returncode == 0
        written = {path.name: path.read_bytes() for path in place.iterdir()}
        assert done.stdout or written
        found.append((done.stdout, done.stderr, written))
    assert found[0] == found[1]


@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_a_folder_without_a_trace_is_refused(words, tmp_path):
    """The error for a folder without a trace names the missing file; nothing is written."""
    (tmp_path / "empty").mkdir()
    given = ["empty" if word == "SOURCE" else word for word in words]
    done = run_here(*given, cwd=tmp_path)
    assert done.returncode == 2
    assert "empty is a directory without trace.jsonl.gz" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
