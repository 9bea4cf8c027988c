"""`kvcore plugins`: what is installed, where it is from, and whether it works here."""

from __future__ import annotations

import attrs
import click

from kvcore.cli.output import emit_json, json_option, print_table
from kvcore.plugins import Plugins


@click.command()
@json_option
def plugins(*, as_json: bool) -> None:
    """List the plugins, where each is from, and whether it works here."""
    infos = Plugins().listing()
    if as_json:
        emit_json({"schema": 1, "plugins": [attrs.asdict(info) for info in infos]})
        return
    print_table(
        ["kind", "name", "distribution", "version", "module", "usable"],
        (
            (i.kind, i.name, i.distribution, i.version, i.module, i.reason or "yes")
            for i in infos
        ),
    )
