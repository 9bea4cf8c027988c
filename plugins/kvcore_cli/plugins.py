"""`kvcore plugins`: the installed plugins, and whether they work here."""

from __future__ import annotations

import click

from kvcore.config.options import known_modes
from kvcore.plugins.manager import KINDS, installed
from kvcore_cli.output import emit_json, json_option, print_table, terminal_width
from kvcore_cli.verb import verb

ROOMY = 100
"""Columns of a terminal from which on the table names modules."""


@verb("kvcore plugins", "kvcore plugins eviction --json")
@click.argument(
    "kind", type=click.Choice([*KINDS, "verb", "mode"]), required=False, metavar="[KIND]"
)
@json_option
def plugins(kind: str | None, *, as_json: bool) -> None:
    """List the plugins, all or those of a kind, where each is from, and whether it works here.

    A broken plugin is listed too, with the reason, and so is an entry point that cannot be
    loaded, without a kind. The verbs and modes that packages add come first.
    """
    known_modes()  # One that cannot be used is listed with the reason.
    added, infos = (
        # What cannot be loaded may be of any kind.
        [info for info in rows if kind is None or info.kind in (kind, None)]
        for rows in (installed().additions(), installed().listing())
    )
    if as_json:
        listed = {"plugins": infos, "additions": added}
        tables = {key: [info._asdict() for info in rows] for key, rows in listed.items()}
        emit_json({"schema": 1, **tables})
        return
    columns = ["kind", "name", "distribution", "version", "module"]
    if (terminal_width() or ROOMY) < ROOMY:
        columns.remove("module")
    print_table(
        [*columns, "usable"],
        (
            [*(getattr(i, column) or "-" for column in columns), (i.reason or "yes")]
            for i in (*added, *infos)
        ),
    )
