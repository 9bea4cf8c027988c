"""`kvcore judge`: the rules and the score of the eviction policy in a file."""

from __future__ import annotations

import sys
from typing import Any

import click

from kvcore.sections import Section, Table
from kvcore_cli.output import emit_json, json_option, print_sections
from kvcore_cli.report.tables import NONE
from kvcore_cli.verb import Count, echo, verb
from kvcore_judge.entries import Entry
from kvcore_judge.protocol import Panel, cell_name, find_panel
from kvcore_judge.sandbox import Limits
from kvcore_judge.verdict import Judge, Verdict

BROKEN = 1
"""Exit code if the policy breaks a rule: a check failed."""


@verb("kvcore judge my_policy.py", "kvcore judge my_policy.py --panel public --json")
@click.argument("file", metavar="FILE")
@click.option(
    "--panel",
    default="quick",
    metavar="quick|public|FILE",
    help="Streams and pool sizes: quick, public, or a TOML file with streams of your own.",
)
@click.option("--seconds", type=Count(), default=60, help="CPU time of each part of the test.")
@click.option("--memory", type=Count(), default=2048, help="Memory of the policy, in MiB.")
@click.option(
    "--no-kit",
    is_flag=True,
    help="Leave out the kit of eviction policies, which needs the extra `testing`.",
)
@click.option(
    "--unsafe",
    is_flag=True,
    help="Run the policy also where the kernel cannot refuse writes and connections.",
)
@json_option
def judge(file: str, **given: Any) -> None:
    """Judge the eviction policy in FILE: its rules, then its score.

    The policy is run in a process without network, with a read-only file system and limits of
    time and memory; what it prints is dropped. The conformance kit comes first; then it must
    decide the same again, and not look ahead; then it is replayed on the panel. The score that
    counts is that of the panel `public`. FILE.py:CLASS names one of several classes. The exit
    code is 1 if the policy breaks a rule.
    """
    limits = Limits(given["seconds"], given["memory"] << 20)
    panel = find_panel(given["panel"])
    judge_of_panel = Judge(panel, limits, kit=not given["no_kit"], unsafe=given["unsafe"])
    for note in panel.notes:
        echo(f"kvcore: {note}", err=True)
    verdict = judge_of_panel.judge(Entry(file))
    if given["as_json"]:
        emit_json(verdict.document())
    else:
        print_sections(*_sections(verdict, panel, kit=not given["no_kit"]))
    if not verdict.passed:
        sys.exit(BROKEN)


def _sections(verdict: Verdict, panel: Panel, *, kit: bool) -> list[Section]:
    """Return the report on a verdict on a panel, with the kit or without."""
    name = verdict.policy.get("name", "the policy")
    if not verdict.passed:
        return [f"{name} breaks the rule `{verdict.rule}`: {verdict.what}"]
    score = verdict.score
    assert score is not None
    worst = NONE if score.worst is None else f"{score.worst[0]} on {score.worst[1]}"
    table = Table(
        ["cell", "hits", "lru", "optimum"],
        [
            [
                cell_name(cell["stream"], cell["share"]),
                *(f"{cell[column]:,}" for column in ("hits", "lru", "optimum")),
            ]
            for cell in verdict.cells
        ],
    )
    tested = f"{verdict.tests} tests of the kit passed." if kit else "The kit was not run."
    tuned = any(cell["tuned"] for cell in verdict.cells)
    of = " of the streams that it was not tuned on" if tuned else ""
    return [
        _first_look(panel),
        (
            f"{name}: {score.headline or NONE} of LRU's hits (geometric mean{of}), "
            f"{score.of_optimum or NONE} of the optimum's; worst cell {worst}. {tested}"
        ),
        table,
    ]


def _first_look(panel: Panel) -> str:
    """Return the warning of a score of the quick panel; empty of others."""
    if panel.name != "quick":
        return ""
    counts = len(find_panel("public").names)
    return (
        f"Quick panel: {len(panel.names)} cells, of short streams, where the public panel has "
        f"{counts}. The order of policies may be another there: the score that counts is that "
        "of --panel public."
    )
