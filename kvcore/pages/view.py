"""The page of a trace, or of two side by side: every moment of the pool, in one file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvcore.files import file_bytes
from kvcore.pages.differences import find_differences
from kvcore.pages.playback import Playback
from kvcore.pages.shell import Page
from kvcore.progress import Progress, silent

SCRIPTS = (
    *("playback.js", "content.js", "differences.js", "story.js", "blocks.js", "pool.js"),
    *("tree.js", "lives.js", "timeline.js", "curves.js", "log.js", "request.js", "view.js"),
)
"""Of the page, in the order in which one needs another."""


def view_page(files: Sequence[str | os.PathLike[str]], *, progress: Progress = silent) -> bytes:
    """Return a page that plays one trace, or two side by side.

    Takes about 30 µs a line, and memory for all of the trace: some 1 kB a line.

    Raises:
        InputError: a file cannot be opened.
        TraceError: a line is damaged or contradicts what came before, or a file is cut.
        PluginError: plotly is not installed.
    """
    names = _names([Path(file) for file in files])
    sides = []
    for file in files:
        with progress(f"reading {Path(file).name}", file_bytes(Path(file))) as tick:
            sides.append(Playback(file, tick))
    title = " and ".join(names)
    note = ""
    if len(sides) > 1:
        differences = find_differences(*sides)
        note = differences.note
        for side, blocks in zip(sides, differences.blocks, strict=False):
            side.rows["differs"] = blocks
    data: dict[str, object] = {"view": {"title": title, "names": names, "note": note}}
    for number, side in enumerate(sides):
        data[f"side{number}-about"] = side.document()
        data |= {f"side{number}-{name}": raw for name, raw in side.columns().items()}
    return Page(title, "<main></main>", SCRIPTS, ["view.css", "serving.css"], data).render()


def _names(files: Sequence[Path]) -> list[str]:
    """Return short names of files, which differ if the files do."""
    names = [file.name for file in files]
    return names if len(set(names)) == len(names) else [str(file) for file in files]
