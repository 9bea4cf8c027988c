"""Sections: the report on a result as data, which terminals and notebooks render."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from kvcore.units import format_number


class Table(NamedTuple):
    """A table of texts: no cell is markup, and none needs another format.

    Every row has a cell for each header, which is shown as `str` returns it. A table without
    rows is left out.

    Attributes:
        headers: the headers of the columns.
        rows: the cells, row by row.
        right: the headers of the columns that are flush right; None: all but the first.
            Headers that the table lacks have no effect.
        split: whether a table that is too wide may become several, each with the first column.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: Collection[str] | None = None
    split: bool = False

    @property
    def flush_right(self) -> Collection[str]:
        """The headers of the columns that are flush right."""
        return self.headers[1:] if self.right is None else self.right


class Panel(NamedTuple):
    """Lines over an axis.

    Attributes:
        label: the quantity, with its unit.
        lines: points (place on the axis, value) by the name of the line.
        text: formats a value.
        bound: name and value of a limit that no line exceeds, or of a goal; None: no bound.
        bands: low and high ends of an interval by the name of a line: a pair for each point.
    """

    label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    text: Callable[[float], str]
    bound: tuple[str, float] | None = None
    bands: Mapping[str, Sequence[tuple[float, float]]] = {}


class Chart(NamedTuple):
    """Panels side by side over one axis; bars, if the axis has one value.

    Attributes:
        title, caption: the run, in a few words and with all options; empty: none.
        across: the quantity of the axis, with its unit.
        panels: the panels over the axis, the most important first.
        axis_text: formats a value of the axis.
        logarithmic: whether an axis with values far apart is logarithmic.
    """

    title: str
    caption: str
    across: str
    panels: Sequence[Panel]
    axis_text: Callable[[float], str] = format_number
    logarithmic: bool = True


Section: TypeAlias = str | Table | Chart
"""Sentences, of which each line is a paragraph; a table; or a chart.

A report's sections are in the order of reading. Each is understood without a chart, which a
renderer may leave out.
"""
