"""Rows of CSV in files that are read line by line."""

from __future__ import annotations

import csv


def split_row(line: str, delimiter: str = ",", *, skip_spaces: bool = False) -> list[str]:
    """Return the cells of a line, which is a whole row.

    Args:
        line: the line; its end does not count.
        delimiter: the mark between two cells.
        skip_spaces: whether spaces after a mark are no part of a cell, quoted or not.

    Raises:
        csv.Error: it is no row; as one whose last cell goes on in the next line.
    """
    text = line.rstrip("\r\n")
    try:
        (cells,) = csv.reader(
            [text], delimiter=delimiter, strict=True, skipinitialspace=skip_spaces
        )
    except csv.Error as error:
        if "unexpected end" not in str(error):
            raise
        msg = (
            "a quoted cell has no end on this line; a row is a line here, so replace line "
            "breaks within cells"
        )
        raise csv.Error(msg) from None
    return cells
