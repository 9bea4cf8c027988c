"""Results in notebooks: tables, plots and data frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import attrs

from kvcore.errors import shorten
from kvcore.lazy import import_extra

if TYPE_CHECKING:
    from kvcore.sections import Section


class Shown:
    """Base of results with a report, which is printed, and which a notebook shows with plots.

    Its classes have no other `__repr__`: those of attrs would list every row.
    """

    __slots__ = ()

    def __str__(self) -> str:
        """Return the report as the command line prints it; without reports, the short form."""
        import kvcore  # noqa: PLC0415 - its table says where reports on all results are

        try:
            return kvcore.report_text(self)
        except ImportError:
            return repr(self)

    def __repr__(self) -> str:
        """Return the class with the fields that are short, and the lengths of others."""
        parts = []
        for field in attrs.fields(type(self)):  # type: ignore[arg-type]  # all are of attrs
            value = getattr(self, field.name)
            if isinstance(value, str | int | float):
                parts.append(f"{field.name}={shorten(repr(value), 60)}")
            elif isinstance(value, Sized):
                parts.append(f"{len(value):,} {field.name}")
        return f"{type(self).__name__}({', '.join(parts)})"

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


def data_frame(
    data: Sequence[Mapping[str, Any]] | Mapping[str, Any],
    instead: str,
    types: Mapping[str, str] | None = None,
) -> Any:
    """Return a polars DataFrame of rows or columns.

    Other libraries read it without a copy, by Arrow's PyCapsule interface.

    Args:
        data: a list of rows, or columns by name.
        instead: the name of an attribute with the same data, for the error without polars.
        types: `str`, `int`, `float` or `bool` by name of columns that may have no value at all,
            so that frames of several results go together; a frame without rows has these.

    Raises:
        PluginError: polars is not installed.
    """
    needed = "to_frame needs polars, which cannot be imported"
    pl = import_extra("polars", needed, "lab", f", or make a frame of {instead} yourself")
    kinds = {"str": pl.String, "int": pl.Int64, "float": pl.Float64, "bool": pl.Boolean}
    known = {name: kinds[kind] for name, kind in (types or {}).items()}
    if not data:
        return pl.DataFrame(schema=known)
    names = data if isinstance(data, Mapping) else data[0]
    known = {name: kind for name, kind in known.items() if name in names}
    return pl.DataFrame(data, infer_schema_length=None, schema_overrides=known)
