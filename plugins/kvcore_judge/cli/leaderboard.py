"""`kvcore leaderboard`: rank eviction policies by one protocol."""

from __future__ import annotations

from pathlib import Path
from secrets import randbelow
from typing import Any

import click
import orjson
from click.core import ParameterSource

from kvcore.errors import InputError
from kvcore.files import atomic_file
from kvcore.units import INT64_LIMIT
from kvcore.untrusted import parse_json
from kvcore_cli.output import (
    emit_json,
    file_option,
    input_option,
    json_bytes,
    json_option,
    print_sections,
    progress,
)
from kvcore_cli.verb import Count, Unrecorded, echo, option, verb
from kvcore_judge.entries import Entry
from kvcore_judge.leaderboard import (
    Leaderboard,
    built_in_entries,
    check_leaderboard,
    check_scores,
    make_leaderboard,
    panel_of,
)
from kvcore_judge.protocol import BUILT_IN, find_panel
from kvcore_judge.report import LeaderboardReport, leaderboard_page
from kvcore_lab.sweep.journal import Journal
from kvcore_plugins.host import cpus

PAGE, DOCUMENT = ".html", ".json"

MADE, CHECKED = ("out", "resume", "as_json"), ("cells", "seed")
"""The options of a leaderboard that is made, and of one that is checked."""


@verb(
    "kvcore leaderboard --policy my_policy.py",
    "kvcore leaderboard --policy lfu --policy arc --panel quick",
    "kvcore leaderboard --check leaderboard.json --cells 3",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME|FILE",
    help="Eviction policy: a name with options, such as lfu:half_life=300, or a Python file. "
    "May be given several times.  [default: all that are installed]",
)
@click.option(
    "--panel",
    metavar="public|quick|FILE",
    help="Streams and pool sizes: public, quick, or a TOML file with streams of your own.  "
    "[default: public; with --check that of the leaderboard]",
)
@option(
    "--jobs",
    cls=Unrecorded,
    type=Count(),
    help="Number of processes.  [default: one a CPU]",
)
@file_option(
    "--resume",
    help="File to which finished cells are appended; cells that it has are not run again.",
)
@input_option(
    "--check",
    help="Compute the scores of a leaderboard again, run some of its cells again, and say "
    "whether they are the same. Policies in files are those of --policy.",
)
@click.option("--cells", type=Count(), default=3, help="With --check: number of cells.")
@click.option(
    "--seed",
    type=Count(-INT64_LIMIT),
    help="With --check: seed that draws the cells.  [default: another each time]",
)
@file_option(
    "-o", "--out", help="File for the leaderboard: .html for a page, .json for the document."
)
@json_option
@click.pass_context
def leaderboard(ctx: click.Context, /, **given: Any) -> None:
    """Rank eviction policies by one protocol.

    Each policy is replayed on each stream of a panel, in pools that hold a share of the blocks
    that the stream ever uses: 0.5 to 50 % of them in the panel `public`. The score is the
    geometric mean of its hits over those of LRU, beside its worst cell and its share of the
    optimum.
    """
    checks = given["check"] is not None
    for param in ctx.command.params:
        default = ctx.get_parameter_source(str(param.name)) is ParameterSource.DEFAULT
        if not default and param.name in (MADE if checks else CHECKED):
            whose = "of a leaderboard that is made" if checks else "for --check alone"
            msg = f"{param.opts[-1]} is {whose}: leave it out"
            raise InputError(msg)
    if checks:
        _check(given)
        return
    panel, out = find_panel(given["panel"] or BUILT_IN[0]), given["out"]
    if out is not None and out.suffix not in (PAGE, DOCUMENT):
        msg = f"--out {out}: the name ends in {PAGE} for a page, or {DOCUMENT} for the document"
        raise InputError(msg)
    board = make_leaderboard(
        panel,
        [Entry(text) for text in given["policies"]] or built_in_entries(),
        jobs=given["jobs"] or cpus(),
        journal=None if given["resume"] is None else Journal(given["resume"], "--resume"),
        progress=progress,
    )
    for note in panel.notes:
        echo(f"kvcore: {note}", err=True)
    if out is not None:
        _write(board, out)
    if given["as_json"]:
        emit_json(board.document())
    elif out is None:
        print_sections(*LeaderboardReport(board).sections)


def _write(board: Leaderboard, out: Path) -> None:
    document = json_bytes(board.document())
    with atomic_file(out) as file:
        file.write(leaderboard_page(board) if out.suffix == PAGE else document.decode())


def _check(given: dict[str, Any]) -> None:
    """Run cells again; raise InputError if one differs."""
    try:
        document = parse_json(given["check"].read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        msg = f"--check {given['check']}: {error}"
        raise InputError(msg) from error
    wrong, panel = 0, panel_of(document, given["panel"])
    check_scores(document, panel)
    # Whoever made a leaderboard cannot know which of its cells are run.
    seed = randbelow(1 << 32) if given["seed"] is None else given["seed"]
    echo(f"scores and ranks follow from the cells; run again, by --seed {seed}:")
    named = map(Entry, given["policies"])
    for checked in check_leaderboard(document, panel, given["cells"], seed, named):
        wrong += not checked.same
        how = "the same" if checked.same else f"DIFFERS in {', '.join(checked.differing)}"
        hits, digest = checked.found["hits"], checked.found["evictions"]
        echo(f"{checked.policy} on {checked.cell}: {hits:,} hits, evictions {digest}: {how}")
    if wrong:
        msg = f"{wrong} of the cells that were run again differ from the leaderboard"
        raise InputError(msg)
