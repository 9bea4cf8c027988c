"""Results in a notebook: a table and a plot, and data frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from kvcore.extras import import_extra

VIEWS = "kvcore.report.notebook"
"""The module that draws results. It is imported when a notebook asks, and never by name: it
knows all kinds of results, which are made in rooms below it."""


class Shown:
    """A result that a notebook shows as a small table, and with matplotlib a plot."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the result as HTML, all texts escaped."""
        html: str = import_module(VIEWS).html(self)
        return html


def data_frame(data: Sequence[Mapping[str, Any]] | Mapping[str, Any], instead: str) -> Any:
    """Return a polars DataFrame of rows or columns.

    Other libraries take it without a copy, by Arrow's PyCapsule interface.

    Args:
        data: rows by column, or columns.
        instead: what has the same data, for who lacks polars.

    Raises:
        PluginError: polars is not installed.
    """
    needed = "to_frame needs polars, which cannot be imported"
    pl = import_extra("polars", needed, "lab", f", or make a frame of {instead} yourself")
    return pl.DataFrame(data, infer_schema_length=None)
