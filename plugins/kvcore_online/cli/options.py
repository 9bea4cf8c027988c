"""The option that servers and proxies share."""

from __future__ import annotations

import click

log_option = click.option(
    "--log-json", is_flag=True, help="Print messages as JSON objects, a line each."
)
