"""Results in notebooks: tables, plots and data frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcore.lazy import import_extra

if TYPE_CHECKING:
    from kvcore.sections import Section


class Shown:
    """Base of results with a report, which a notebook shows; with matplotlib, plots too."""

    __slots__ = ()

    def sections(self) -> list[Section]:
        """Return the report on the result: sentences, tables and charts, in order."""
        import kvcore  # noqa: PLC0415 - its table says where reports on all results are

        sections: list[Section] = kvcore.report_on(self).sections
        return sections

    def _repr_html_(self) -> str | None:
        """Return the result as HTML with escaped texts; None without the package of reports."""
        import kvcore  # noqa: PLC0415 - as above

        try:
            return kvcore.report_html(self)
        except ImportError:
            return None  # A notebook shows its text.


def data_frame(data: Sequence[Mapping[str, Any]] | Mapping[str, Any], instead: str) -> Any:
    """Return a polars DataFrame of rows or columns.

    Other libraries read it without a copy, by Arrow's PyCapsule interface.

    Args:
        data: a list of rows, or columns by name.
        instead: the name of an attribute with the same data, for the error without polars.

    Raises:
        PluginError: polars is not installed.
    """
    needed = "to_frame needs polars, which cannot be imported"
    pl = import_extra("polars", needed, "lab", f", or make a frame of {instead} yourself")
    return pl.DataFrame(data, infer_schema_length=None)
