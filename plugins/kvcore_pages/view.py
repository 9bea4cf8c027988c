"""The page of a trace, or of two side by side: every moment of the pool, in one file."""

from __future__ import annotations

import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvcore.files import file_bytes
from kvcore.progress import Progress, silent
from kvcore.units import NS_PER_S
from kvcore_pages.grouped_playback import playback_of
from kvcore_pages.playback import WHOLE, EvictedContent, Playback, Window
from kvcore_pages.shell import Page, charting_library

__all__ = ["view_page"]

SCRIPTS = (
    *("playback.js", "groups.js", "content.js", "differences.js", "story.js", "blocks.js"),
    *("pool.js", "tree.js", "lives.js", "timeline.js", "curves.js", "log.js", "request.js"),
    "view.js",
)
"""Scripts of the page, each after those that it needs."""


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

    Takes about 20 µs a line, and memory for the whole trace: up to 1 kB a line. The page
    opens at the time `at` (ns); None: at the costliest eviction. `notify` is called with a
    notice on each part of a trace that the page lacks; the page has the notice, too. Of the
    trace of a cluster the page shows one `replica`, and of a replica that failed and returned
    one of its lives, such as `1:2`.

    Raises:
        InputError: a file cannot be opened, or has no line in the window.
        TraceError: a line is damaged or contradicts what came before, or a file is cut.
        PluginError: plotly is not installed.
    """
    charting_library()  # That it is missing is told before traces are read.
    names = [Path(file).name for file in files]
    if len(set(names)) < len(names):
        names = [str(file) for file in files]
    if replica is not None:
        names = [f"{name}, replica {replica}" for name in names]
    sides = []
    for file in files:
        with progress(f"reading {Path(file).name}", file_bytes(Path(file))) as tick:
            compared = len(files) > 1
            kind = playback_of(file, replica)
            sides.append(kind(file, tick, window, replica, compared=compared))
    title = " and ".join(names)
    note = ""
    if len(sides) > 1:
        differences = find_differences(*sides)
        note = differences.note
        for side, blocks in zip(sides, differences.blocks, strict=False):
            side.rows["differs"] = blocks
    notices = [*filter(None, map(_left_out, names, sides))]
    for notice in notices:
        notify(notice)
    about = {"title": title, "names": names, "note": note, "notices": notices, "at": at}
    data: dict[str, object] = {"view": about}
    for index, side in enumerate(sides):
        data[f"side{index}-about"] = side.document()
        data |= {f"side{index}-{name}": raw for name, raw in side.columns().items()}
    del sides, side  # their rows are in `data`
    return Page(title, "<main></main>", SCRIPTS, ["view.css"], data).render()


def _left_out(name: str, side: Playback) -> str:
    """Return a notice on the part of a trace that a page lacks; empty if it lacks none."""
    rows, times = len(side.rows["kind"]), side.rows["time"]
    if rows == side.lines:
        return ""
    begin, end, first = times[0], sum(times), side.first_line
    total = f"{side.lines:,}; the trace ends at {side.ended / NS_PER_S:,.3f} s"
    return (
        f"{name}: this page plays lines {first + 1:,} to {first + rows:,}, from "
        f"{begin / NS_PER_S:,.3f} s to {end / NS_PER_S:,.3f} s, of {total}. The pool at their "
        "begin is exact; curves, timeline and events show these lines alone. --window "
        "START:END (seconds) makes a page of another part, --events N one of more lines."
    )


@attrs.frozen
class Differences:
    """The evictions in which two traces differ, the left and the right one.

    Attributes:
        blocks: for each trace a column with the number of blocks of each row that differ;
            empty if the traces cannot be compared.
        note: why nothing is marked, or how many requests are in one trace only; empty if
            neither is the case.
    """

    blocks: tuple[array[int], ...]
    note: str = ""


def find_differences(left: Playback, right: Playback) -> Differences:
    """Return the evictions in which two traces differ, block by block. O(evicted blocks).

    Each block of an EVICT line of scope `cache` is a loss: the request that needed the room,
    and the content of the block, which is its key and, where a key covers several blocks, its
    place among them. A content that one request evicts n times, as a preempted one may, is n
    losses. An eviction differs if any of its losses is not in the other trace: so the time,
    the number of lines and the spans do not matter. A content that both traces evict, and
    for different requests, differs in both.

    Traces without a common request, whose blocks or keys stand for other numbers of tokens, or
    that have other cache groups, are not compared: no content of one is a content of the other.
    They are no error, since two pools of other blocks can still be watched side by side.
    """
    why = ""
    for field, name in (("block_size", "Blocks"), ("key_tokens", "Keys")):
        one, other = left.header[field], right.header[field]
        if one != other and not why:
            why = f"{name} stand for {one} tokens on the left and {other} on the right"
    if not why and _groups(left) != _groups(right):
        why = "Their cache groups differ"
    if why:
        note = f"{why}, so their contents cannot be compared: no eviction is marked."
        return Differences((), note)
    one_ids, other_ids = _prompts(left), _prompts(right)
    common, most = len(one_ids.items() & other_ids.items()), max(len(one_ids), len(other_ids))
    if not common:
        note = (
            "No request is in both traces, with the same prompt: no eviction is marked. Record "
            "both from one workload to see what differs."
        )
        return Differences((), note)
    blocks = _mark(left, right), _mark(right, left)
    note = f"Only {common:,} of {most:,} requests are in both traces." if common < most else ""
    return Differences(blocks, note)


def _groups(side: Playback) -> list[tuple[str, int]]:
    """Return what the blocks of each cache group hold; none without groups."""
    groups = side.header.get("cache_groups", {}).get("groups", ())
    return [(group["kind"], group["block_size"]) for group in groups]


def _prompts(side: Playback) -> dict[int | str, Any]:
    """Return the last key of each prompt, by id: keys are chained, so it stands for all."""
    return dict(zip(side.prompts.ids, side.prompts.last_key, strict=True))


def _mark(side: Playback, other: Playback) -> array[int]:
    """Return how many blocks of each row `other` has not evicted for the same request."""
    marks = array("i", bytes(4 * len(side.rows["kind"])))
    theirs = _by_requester(other)
    for requester, lines in _by_requester(side).items():
        left_over = Counter(
            content for line in theirs[requester] for content in _contents(line, side.ratio)
        )
        for line in lines:
            for content in _contents(line, side.ratio):
                if left_over[content]:
                    left_over[content] -= 1
                else:
                    marks[line.row] += 1
    return marks


def _by_requester(side: Playback) -> dict[int | str, list[EvictedContent]]:
    by_requester = defaultdict(list)
    for content in side.evicted:
        by_requester[content.requester].append(content)
    return by_requester


def _contents(evicted: EvictedContent, ratio: int) -> Iterator[tuple[Any, int]]:
    """Yield the key of each block, and which of the key's blocks it is."""
    for index in range(evicted.first, evicted.end):
        yield evicted.keys[index // ratio], index % ratio
