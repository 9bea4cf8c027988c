"""The page of a trace, or of two side by side: every moment of the pool, in one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvcore.files import file_bytes
from kvcore.pages.differences import find_differences
from kvcore.pages.playback import WHOLE, Playback, Window
from kvcore.pages.shell import Page
from kvcore.progress import Progress, silent
from kvcore.units import NS_PER_S

SCRIPTS = (
    *("playback.js", "content.js", "differences.js", "story.js", "blocks.js", "pool.js"),
    *("tree.js", "lives.js", "timeline.js", "curves.js", "log.js", "request.js", "view.js"),
)
"""Of the page, in the order in which one needs another."""


def view_page(
    files: Sequence[str | os.PathLike[str]],
    *,
    window: Window = WHOLE,
    at: int | None = None,
    replica: int | str | None = None,
    progress: Progress = silent,
    notify: Callable[[str], object] = len,
) -> bytes:
    """Return a page that plays one trace, or two side by side.

    Takes about 30 µs a line, and memory for all of the trace: up to 1.6 kB a line. The page
    opens at the time `at` (ns); None: at the eviction that cost most. `notify` is called with
    what of the traces is not in the page, which also says it itself. Of clusters the page has
    one `replica`; of one that failed a life of it, as `1:2`.

    Raises:
        InputError: a file cannot be opened, or has no line in the window.
        TraceError: a line is damaged or contradicts what came before, or a file is cut.
        PluginError: plotly is not installed.
    """
    names = _names([Path(file) for file in files])
    if replica is not None:
        names = [f"{name}, replica {replica}" for name in names]
    sides = []
    for file in files:
        with progress(f"reading {Path(file).name}", file_bytes(Path(file))) as tick:
            sides.append(Playback(file, tick, window, replica))
    title = " and ".join(names)
    note = ""
    if len(sides) > 1:
        differences = find_differences(*sides)
        note = differences.note
        for side, blocks in zip(sides, differences.blocks, strict=False):
            side.rows["differs"] = blocks
    notices = [
        notice
        for name, side in zip(names, sides, strict=True)
        for notice in _left_out(name, side)
    ]
    for notice in notices:
        notify(notice)
    about = {"title": title, "names": names, "note": note, "notices": notices, "at": at}
    data: dict[str, object] = {"view": about}
    for number, side in enumerate(sides):
        data[f"side{number}-about"] = side.document()
        data |= {f"side{number}-{name}": raw for name, raw in side.columns().items()}
    return Page(title, "<main></main>", SCRIPTS, ["view.css"], data).render()


def _left_out(name: str, side: Playback) -> Iterator[str]:
    """Yield what of a trace a page does not have, and how to see it."""
    rows, times = len(side.rows["kind"]), side.rows["time"]
    if rows == side.lines:
        return
    begin, end = times[0], sum(times)
    whole = f"{side.lines:,}; the trace ends at {side.ended / NS_PER_S:,.3f} s"
    yield (
        f"{name}: this page plays lines {side.first + 1:,} to {side.first + rows:,}, from "
        f"{begin / NS_PER_S:,.3f} s to {end / NS_PER_S:,.3f} s, of {whole}. The pool at their "
        "begin is exact; curves, timeline and events show these lines alone. --window "
        "START:END (seconds) makes a page of another part, --events N one of more lines."
    )


def _names(files: Sequence[Path]) -> list[str]:
    """Return short names of files, which differ if the files do."""
    names = [file.name for file in files]
    return names if len(set(names)) == len(names) else [str(file) for file in files]
