"""A policy beside LRU, ARC and the optimum, for the page in which it is typed.

The page runs this module in the browser's Python; it is the same code as that of `kvcore
leaderboard`, and gives the same document.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any

import attrs
import orjson

from kvcore import KVCache
from kvcore.errors import InputError, KvcoreError
from kvcore.progress import Progress, Tick, silent
from kvcore.sections import Table
from kvcore_cli.report.tables import NONE
from kvcore_events.recording import is_recording
from kvcore_judge.entries import Entry
from kvcore_judge.leaderboard import BASE, Leaderboard, make_leaderboard
from kvcore_judge.misses import meaning, missed_tokens, replay_summary
from kvcore_judge.protocol import Panel, Stream, find_panel, read_stream
from kvcore_judge.report import LeaderboardReport
from kvcore_lab.sweep.journal import Journal

RIVAL = Entry("arc")

PANELS = {
    "quick": "quick panel: 3 streams, 2 sizes",
    "public": "public panel: 5 streams, 7 sizes, minutes",
}
"""The panels that can be chosen, each with its description."""

MISSES_SHARE = 100
"""The pool size, in thousandths of the footprint, in which misses are explained."""

RECORDING = (
    "{file} is a recording of KV events, which does not say whether every use was reported, "
    "nor can it be said here. If the engine reported them (kv_cache_report_mode=full), `kvcore "
    "simulate kv-events:path={file},lookups=full --trace run.jsonl.gz` writes a trace of its "
    "requests, to be dropped in its place; with a log of the requests, requests=LOG does"
)

_OPTIONS = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


def choices() -> dict[str, str]:
    """Return what a policy can be run on, each with its description."""
    return PANELS | {name: f"{name}: one stream" for name in _streams()}


def panel_of(choice: str, limit: int | None) -> Panel:
    """Return a panel, or one stream of the public panel or in a file, under the clock as well.

    Args:
        choice: the name of a panel or of a stream, or the path of a file of requests.
        limit: number of the first requests of one stream; None: all. A panel has its own.

    Raises:
        InputError: the limit is no whole number from 1 on, or the file is a recording of KV
            events, which are no requests without an option.
    """
    if choice in PANELS:
        return find_panel(choice)
    # JavaScript has one kind of numbers: what is beyond 53 bits comes as a float.
    if limit is not None and (type(limit) is not int or limit < 1):
        msg = f"requests must be a whole number from 1 on, or none for all, not {limit!r}"
        raise InputError(msg)
    streams = _streams()
    stream = streams.get(choice) or Stream(Path(choice).name, choice)
    if choice not in streams and is_recording(choice):
        raise InputError(RECORDING.format(file=stream.name))
    return Panel(stream.name, (attrs.evolve(stream, limit=limit, timed=True),))


def _streams() -> dict[str, Stream]:
    """Return the streams of the public panel by name."""
    return {stream.name: stream for stream in find_panel("public").streams}


def work(
    policy: Path,
    choice: str,
    limit: int | None = None,
    *,
    journal: Journal | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Return what the page shows of the policy in a file, as a JSON object.

    Its `document` is the text that `kvcore leaderboard -o board.json` writes.

    Args:
        policy: the file, which may have been another one at the last call.
        choice: what to run it on, as in `panel_of`.
        limit: number of requests, as in `panel_of`.
        journal: a file that keeps finished cells, those of LRU and ARC above all.
        progress: shows the number of cells that are done.

    Raises:
        InputError: the file has no policy, one that looks ahead, or the requests are no good.
        PluginError: the file cannot be run.
        PolicyError: the policy failed, or answered what it must not.
    """
    # A file is run once, and kept by its path.
    sys.modules.pop(str(policy.resolve()), None)
    entry = Entry(str(policy))
    if entry.looks_ahead:
        msg = (
            f"{policy}: it defines on_queued(), by which it hears of requests before they are "
            "served; a score is for policies that do not look ahead"
        )
        raise InputError(msg)
    panel = panel_of(choice, limit)
    board = make_leaderboard(panel, [RIVAL, entry], journal=journal, progress=progress)
    report = LeaderboardReport(board)
    tables = {
        "Score": report.table,
        "Hits, in blocks": _hits(board),
        "Time to the first token": report.times,
        **_misses(panel.streams[0], entry, progress),
    }
    return {
        "headline": report.headline,
        "digest": board.about[entry.text]["source"],
        "tables": [
            {
                "title": title,
                "headers": table.headers,
                "rows": [[*map(str, row)] for row in table.rows],
            }
            for title, table in tables.items()
            if table.rows
        ],
        "curves": [
            {"label": curves.label, "sizes": curves.sizes, "lines": curves.lines}
            for curves in report.curves
        ],
        "reading": "\n".join([report.reading, *panel.notes]),
        "document": orjson.dumps(board.document(), option=_OPTIONS).decode(),
    }


def _hits(board: Leaderboard) -> Table:
    """Return the hits of each policy in each cell, LRU first and the optimum last."""
    texts = [entry.text for entry in board.entries]
    return Table(
        ["cell", "blocks", *texts, "optimum"],
        [
            [
                column.name,
                f"{column.blocks:,}",
                *(f"{board.results[text, column.name].total:,}" for text in texts),
                f"{column.optimum:,}",
            ]
            for column in board.columns
        ],
    )


def _misses(stream: Stream, entry: Entry, progress: Progress) -> dict[str, Table]:
    """Return why prompt tokens missed under LRU and the policy, in one pool, by the title."""
    read = read_stream(stream)
    blocks, size = read.pool(MISSES_SHARE), read.key_tokens
    missed, tokens = [], 1
    with progress("explaining misses", 2) as tick:
        for policy_entry in (BASE, entry):
            cache = partial(
                KVCache, blocks, size, eviction=policy_entry.build(), accounting="keys"
            )
            summary = replay_summary(read.requests, cache)
            missed.append({"hit": summary.hit_tokens} | missed_tokens(summary))
            tokens = max(summary.prompt_tokens, 1)
            tick(1)
    rows = [
        [
            reason if reason == "hit" else f"{reason}: {meaning(reason)}",
            *(
                f"{shares_of[reason] / tokens:.1%}" if reason in shares_of else NONE
                for shares_of in missed
            ),
        ]
        for reason in dict.fromkeys([*missed[0], *missed[1]])
    ]
    title = f"Where prompt tokens went: {stream.name}, {blocks:,} blocks"
    return {title: Table(["tokens", BASE.text, entry.text], rows)}


def answer(
    source: str, choice: str, limit: int | None, report: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Run a policy's source as `policy.py` in the working directory; return `work`'s object.

    If the policy fails it has one key, `error`, with the reason and the line.

    Args:
        source: the text of the file.
        choice: what to run it on, as in `panel_of`.
        limit: number of requests, as in `panel_of`.
        report: called with a description, the number of cells that are done, and of all.
    """
    policy = Path("policy.py")
    try:
        policy.write_text(source, "utf-8", newline="")
        return work(
            policy, choice, limit, journal=Journal("cells.jsonl"), progress=_reported(report)
        )
    # Half of a pair of surrogates has no bytes; a constructor may look for a file.
    except (KvcoreError, UnicodeError, OSError) as error:
        return {"error": f"{error}{_place(error, policy)}"}


def forget() -> None:
    """Forget the requests that were read, since other ones have come to a path."""
    read_stream.cache_clear()


def _reported(report: Callable[[str, int, int], None]) -> Progress:
    @contextmanager
    def progress(description: str, total: int | None) -> Iterator[Tick]:
        done = 0

        def tick(count: int) -> None:
            nonlocal done
            done += count
            report(description, done, total or 0)

        tick(0)
        yield tick

    return progress


def _place(error: BaseException, policy: Path) -> str:
    """Return the line of a policy's file in which an error was raised, in words."""
    cause = error.__cause__ or error
    if isinstance(cause, SyntaxError) and cause.lineno is not None:
        return f"\nline {cause.lineno}: {(cause.text or '').strip()}"
    frames = [
        frame
        for frame in extract_tb(cause.__traceback__)
        if Path(frame.filename).name == policy.name
    ]
    return f"\nline {frames[-1].lineno}: {frames[-1].line}" if frames else ""
